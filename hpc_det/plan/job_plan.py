"""The plan of an experiment's jobs: the decisions that the job script, the job process and the agents rely on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import checked, json_text, made, parsed
from hpc_det.store.experiment_config import read_text
from hpc_det.store.folders import ExperimentFolder


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """One call of the scheduler: `count` identical jobs, each with the same number of workers."""

    first: int
    """Number of the first worker."""
    count: int
    workers_each: int = 1
    """Workers in each job; above 1, that many gangs share a job's allocation and train trial after trial."""
    at_once: int | None = None
    """Largest number of its jobs that run at the same time; None leaves it to the scheduler."""

    @classmethod
    def of(cls, experiment: ExperimentFolder, script: int) -> JobArray:
        """Return the array as `experiment create` recorded it."""
        path = experiment.array(script)
        return made(cls, parsed(path.read_bytes(), path), path)

    @property
    def workers(self) -> int:
        return self.count * self.workers_each

    @property
    def is_shared(self) -> bool:
        return self.workers_each > 1


@dataclass(frozen=True, kw_only=True)
class Mount:
    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path in the container."""
    read_only: bool
    propagation: str
    """Propagation type as mount(8) names it, such as rprivate or rshared."""


@dataclass(frozen=True, kw_only=True)
class Device:
    source: str
    target: str
    mode: str
    """Permissions: letters out of r (read), w (write) and m (mknod)."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container of a node, which all ranks of the node share."""

    runtime: str
    """apptainer, podman or pyxis."""
    image: str
    """A path, an address with ://, or an image name as Docker writes it."""
    mounts: tuple[Mount, ...]
    devices: tuple[Device, ...]
    shm_size: int | None
    """Size of /dev/shm in bytes; None keeps the runtime's default."""
    args: tuple[str, ...]
    """The site's additional flags for the runtime."""

    @property
    def starts_entrypoint(self) -> bool:
        """True if the node agent starts the container for the entrypoint; with pyxis, srun starts the agent in it."""
        return self.runtime != "pyxis"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Container:
        """Return the container of a JSON object. Raises DamagedFile for missing or wrong fields."""
        found = made(cls, data, "container")
        return replace(
            found,
            mounts=tuple(made(Mount, mount, "container") for mount in data["mounts"]),
            devices=tuple(made(Device, device, "container") for device in data["devices"]),
            args=tuple(found.args),
        )


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The plan that all jobs of an experiment share. `JobPlan.from_json(plan.to_json()) == plan`."""

    experiment_id: int
    name: str
    scheduler: str
    """slurm, pbs or local; selects the command builders and the script template."""
    folder: str
    """Absolute path of the experiment's folder, on a file system that every node sees."""
    code: str
    """Folder of the copied context directory, in which ranks run and from which they import."""
    python: str
    """Path of the Python interpreter on the nodes."""
    entrypoint: tuple[str, ...]
    """Command that each node agent executes, without a shell."""
    environment: tuple[str, ...]
    """NAME=value for the ranks. They are stored in plan.json, which only its owner can read, and never in the script.
    """

    nodes: int
    ranks_per_node: int
    """Ranks of a gang on each of its nodes."""
    job_nodes: int
    """Nodes of a job's allocation, for one gang or for all gangs that share the job."""
    job_slots_per_node: int
    """Slots of a job's allocation on each node: those of one gang, or of all gangs that share the job."""
    slot_type: str
    """gpu or cpu."""
    cpus_per_rank: int
    max_restarts: int
    max_attempts_without_progress: int = 5
    """Defaults to 5, since plans of older versions lack the field."""

    partition: str | None
    account: str | None
    qos: str | None
    priority: int | None
    """Determined's priority from 1 to 99, lower first; None leaves the scheduler's default."""
    time_limit_min: int | None
    signal_lead_s: int
    """Seconds before the time limit at which the scheduler sends its warning signal."""
    gpu_flag: str
    """The site's way to request GPUs: gpus-per-node, gres or tres-per-node."""
    gpu_type: str | None
    mem_per_node: str | None
    constraint: str | None = None
    """Features that nodes must have, in Slurm's notation; plans of older versions lack the field and the next one."""
    qos_resource: str | None = None
    """Resource that stands for a quality of service on this PBS site."""
    submit_args: tuple[str, ...]
    """The user's additional flags of sbatch or qsub."""
    srun_args: tuple[str, ...]
    start_agents_with: str
    """Program that starts the agents on the nodes of a PBS job: pbsdsh, pbs_tmrsh or mpiexec."""
    mpi_launcher: tuple[str, ...]
    network_interface: str | None
    """Network interface for the gang's traffic; None detects it."""
    grace_time_s: int | None
    """Seconds between the notice of a preemption and the job's end; None if the profile does not set it."""
    resume: str
    """Requeue mode of a stopped job: requeue, successor, resubmit or chain."""
    chain_length: int
    """With `resume: chain`, the number of jobs queued behind the first."""
    health_checks: bool
    exclude_nodes_for_min: int
    """Minutes for which jobs exclude a node that was lost or failed its health checks."""
    hang_timeout_s: int | None
    """Seconds without a step after which a rank counts as hung; None derives it from step times, 0 disables the check.
    """
    modules: tuple[str, ...]
    setup: tuple[str, ...]
    """The site's shell lines, the only place where a configuration contains shell code."""
    container: Container | None
    startup_hook: bool = False
    """Whether the code has a startup-hook.sh, which agents source before the entrypoint; plans of older versions lack
    the field.
    """
    nursery: bool = True
    """Whether the direct launcher forks the ranks (hpc_det.launch.forked_ranks); plans of older versions lack the
    field and the next one.
    """
    preload: tuple[str, ...] = ()
    """More modules that it imports before it forks."""
    bundle: str = ""
    """The file from which ranks import installed packages (hpc_det.node.import_bundle); empty: none, as in plans of
    older versions.
    """
    stage: str = ""
    """The archive of the Python environment, of which nodes make local copies (hpc_det.launch.staged); empty: none."""
    scratch: str | None
    """Folder on each node's local disk; it may contain variables of the job, such as $SLURM_JOB_ID."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def runs_trial(self) -> bool:
        """True if the entrypoint starts a trial class, whose ranks receive stop requests and write an outcome."""
        # A shell command is one word, which contains the flag.
        return any("--trial" in word for word in self.entrypoint)

    def end_of_grace(self, signal: str = "SIGTERM") -> float | None:
        """Return when a job that gets this signal now will be killed, in seconds since the epoch; None if unknown."""
        # Only SIGTERM announces a preemption; other signals, such as Slurm's --signal, do not start a grace time.
        if self.grace_time_s is None or signal != "SIGTERM":
            return None
        return time.time() + self.grace_time_s

    def to_json(self) -> str:
        return json_text(Path("plan.json"), asdict(self))

    @classmethod
    def of(cls, experiment: ExperimentFolder) -> JobPlan:
        """Return the plan as `experiment create` recorded it."""
        return cls.from_json(read_text(experiment.plan), experiment.plan)

    @classmethod
    def from_json(cls, text: str, file: Path = Path("plan.json")) -> JobPlan:
        """Return the plan of a JSON text. Raises DamagedFile for missing or wrong fields, and NewerFormat."""
        data = checked(parsed(text, file), {"container": dict | None}, file)
        plan = made(cls, {**data, "container": None}, file)
        # JSON has lists in place of tuples.
        texts: dict[str, Any] = {name: tuple(value) for name, value in vars(plan).items() if isinstance(value, list)}
        return replace(plan, **texts, container=data["container"] and Container.from_json(data["container"]))
