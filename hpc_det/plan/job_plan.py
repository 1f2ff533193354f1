"""The jobs of an experiment, fully decided. Everything downstream reads this and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_det.node.json_files import DamagedFile, checked, made, parsed
from hpc_det.store.experiment_config import read_text
from hpc_det.store.folders import ExperimentFolder


@dataclass(frozen=True, kw_only=True)
class JobArray:
    """One call of the scheduler: `count` like jobs, each with the same number of workers."""

    first: int
    """The number of its first worker."""
    count: int
    workers_each: int = 1
    """Above 1 the allocation of a job is shared by so many gangs, trial after trial."""
    at_once: int | None = None
    """How many of its jobs may run at the same time; None: as many as the scheduler lets."""

    @classmethod
    def of(cls, experiment: ExperimentFolder, script: int) -> JobArray:
        """As it was written down at the submission."""
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
    """On the host, absolute."""
    target: str
    """In the container, absolute."""
    read_only: bool
    propagation: str
    """As mount(8) names it: rprivate, rshared, ..."""


@dataclass(frozen=True, kw_only=True)
class Device:
    source: str
    target: str
    mode: str
    """Of the letters r (read), w (write) and m (make the node)."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """One per node: the ranks of a node share it."""

    runtime: str
    """apptainer, podman or pyxis."""
    image: str
    """A path, an address with ://, or an image's name as Docker writes it."""
    mounts: tuple[Mount, ...]
    devices: tuple[Device, ...]
    shm_size: int | None
    """Bytes of /dev/shm; None: as the host has it."""
    args: tuple[str, ...]
    """The site's own flags for the runtime."""

    @property
    def starts_entrypoint(self) -> bool:
        """Whether the node agent starts it, for the entrypoint; srun starts the whole agent in it otherwise."""
        return self.runtime != "pyxis"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Container:
        """Raises DamagedFile."""
        found = made(cls, data, "container")
        return replace(
            found,
            mounts=tuple(made(Mount, mount, "container") for mount in data["mounts"]),
            devices=tuple(made(Device, device, "container") for device in data["devices"]),
            args=tuple(found.args),
        )


@dataclass(frozen=True, kw_only=True)
class JobPlan:
    """The same for all jobs of an experiment. Round-trips: `JobPlan.from_json(plan.to_json()) == plan`."""

    experiment_id: int
    name: str
    scheduler: str
    """slurm, pbs or local: chooses the command builders and the script template."""
    folder: str
    """The experiment's folder, absolute, on a file system that every node sees."""
    code: str
    """The snapshot of the context directory; ranks run and import there."""
    python: str
    entrypoint: tuple[str, ...]
    """What each node agent executes, without a shell."""
    environment: tuple[str, ...]
    """NAME=value for the ranks. They travel in plan.json, its owner's alone, and never through the script."""

    nodes: int
    ranks_per_node: int
    """Of a gang."""
    job_nodes: int
    job_slots_per_node: int
    """Of a job's allocation: a gang's, or what several gangs share."""
    slot_type: str
    """gpu or cpu."""
    cpus_per_rank: int
    max_restarts: int
    max_attempts_without_progress: int = 5
    """Plans of versions before this field lack it."""

    partition: str | None
    account: str | None
    qos: str | None
    priority: int | None
    """Determined's, 1 to 99 with the lower first; None: the scheduler's usual one."""
    time_limit_min: int | None
    signal_lead_s: int
    """How long before the time limit the scheduler warns."""
    gpu_flag: str
    """The site's dialect for GPUs: gpus-per-node, gres or tres-per-node."""
    gpu_type: str | None
    mem_per_node: str | None
    submit_args: tuple[str, ...]
    """The user's own flags of sbatch or qsub."""
    srun_args: tuple[str, ...]
    start_agents_with: str
    """What starts the agents on the nodes of a PBS job: pbsdsh, pbs_tmrsh or mpiexec."""
    mpi_launcher: tuple[str, ...]
    network_interface: str | None
    """For the gang's traffic; None: found by itself."""
    grace_time_s: int | None
    """Between the notice of a preemption and the job's end, where the profile knows it."""
    resume: str
    """requeue, successor, resubmit or chain: how a job that was stopped comes back."""
    chain_length: int
    """With chain: how many jobs wait behind the first from the start."""
    health_checks: bool
    exclude_nodes_for_min: int
    """How long jobs keep away from a node that was lost or failed its checks."""
    hang_timeout_s: int | None
    """Without a step for so long, a rank hangs; None: learned from its steps. 0: nobody watches."""
    modules: tuple[str, ...]
    setup: tuple[str, ...]
    """The site's own shell lines, the one place where a config holds shell text."""
    container: Container | None
    scratch: str | None
    """A folder of each node's own; it may name variables of the job, such as $SLURM_JOB_ID."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def runs_trial(self) -> bool:
        """Whether the entrypoint starts a trial class, whose ranks hear of stops and write an outcome."""
        return any("--trial" in word for word in self.entrypoint)

    def end_of_grace(self, signal: str = "SIGTERM") -> float | None:
        """Return when a job that gets this signal now will be gone, in seconds since the epoch; None: nobody knows.

        Only TERM begins a grace time.
        """
        if self.grace_time_s is None or signal != "SIGTERM":
            return None
        return time.time() + self.grace_time_s

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of(cls, experiment: ExperimentFolder) -> JobPlan:
        """As it was written down at the submission."""
        try:
            return cls.from_json(read_text(experiment.plan))
        except DamagedFile as error:
            raise DamagedFile(f"{experiment.plan}: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> JobPlan:
        """Raises DamagedFile."""
        data = checked(parsed(text, "plan"), {"container": dict | None}, "plan")
        plan = made(cls, {**data, "container": None}, "plan")
        texts: dict[str, Any] = {name: tuple(value) for name, value in vars(plan).items() if isinstance(value, list)}
        return replace(plan, **texts, container=data["container"] and Container.from_json(data["container"]))
