"""What a cluster profile may say: keys, types, defaults."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from hpc_det.config.fields import (
    Expected,
    Flag,
    GpuType,
    NotNegative,
    OptionalText,
    Positive,
    Text,
    Texts,
    TimeLimit,
    Variables,
    time_limit_min,
)
from hpc_det.config.section import Section

SlotType: TypeAlias = Annotated[Literal["gpu", "cpu"], Expected("gpu or cpu")]
MaxNodes: TypeAlias = Annotated[int, Field(ge=1), Expected("how many nodes a job can have, >= 1")]
PreemptMode: TypeAlias = Annotated[
    Literal["off", "requeue", "cancel", "suspend"],
    Expected("what becomes of preempted jobs: off (there are none), requeue, cancel or suspend"),
]

GpuFlag: TypeAlias = Annotated[
    Literal["gpus-per-node", "gres", "tres-per-node"], Expected("gpus-per-node, gres or tres-per-node")
]
StartAgents: TypeAlias = Annotated[Literal["pbsdsh", "pbs_tmrsh", "mpiexec"], Expected("pbsdsh, pbs_tmrsh or mpiexec")]
Resume: TypeAlias = Annotated[
    Literal["auto", "requeue", "rerun", "successor", "resubmit", "chain"],
    Expected("auto, requeue (rerun on PBS), successor, resubmit or chain"),
]


class Pool(Section):
    """A partition or queue. What it says comes before what the profile says of all pools."""

    default: Flag = Field(default=False, description="Jobs go here that name no pool. At most one pool says so.")
    slots_per_node: Positive | None = Field(default=None, description="Instead of the profile's.")
    slot_type: SlotType | None = Field(default=None, description="Instead of the profile's.")
    cpus_per_slot: Positive | None = Field(default=None, description="Instead of the profile's.")
    max_nodes: MaxNodes | None = Field(default=None, description="Instead of the profile's.")
    gpu_type: GpuType | None = Field(default=None, description="Instead of the profile's.")
    max_time_limit: TimeLimit = Field(default=None, description="Instead of the profile's.")
    preempt_mode: PreemptMode | None = Field(default=None, description="Instead of the profile's.")
    grace_time_s: NotNegative | None = Field(default=None, description="Instead of the profile's.")


def _at_most_one_default(pools: dict[str, Pool]) -> dict[str, Pool]:
    if sum(pool.default for pool in pools.values()) > 1:
        raise ValueError
    return pools


class Containers(Section):
    """How the site starts a container, for experiments that name an image."""

    runtime: Annotated[Literal["apptainer", "podman", "pyxis"], Expected("apptainer, podman or pyxis")] | None = Field(
        default=None, description="apptainer, podman, or pyxis (a plugin of Slurm's); null: the site has none."
    )
    args: Texts = Field(
        default=[],
        description="More flags of `apptainer exec` or `podman run`; with pyxis, more `--container-...` flags of srun.",
    )


class Cluster(Section):
    """A site's profile."""

    name: Annotated[Text, Expected("the name of the cluster")] = Field(description="What messages call the cluster.")
    scheduler: Annotated[Literal["slurm", "local", "pbs"], Expected("slurm, pbs or local")] = Field(
        description="slurm, pbs, or local for this machine."
    )
    slots_per_node: Positive = Field(description="GPUs of a node, or ranks of a node without GPUs.")
    slot_type: SlotType = Field(description="gpu or cpu.")
    max_nodes: MaxNodes | None = Field(default=None, description="How many nodes a job can have.")
    resource_pool: OptionalText = Field(default=None, description="The pool where an experiment names none.")
    gpu_flag: GpuFlag = Field(
        default="gpus-per-node", description="How sbatch is asked for GPUs: gpus-per-node, gres or tres-per-node."
    )
    gpu_type: GpuType | None = Field(default=None, description="Such as a100, where the site has several.")
    cpus_per_slot: Positive = Field(default=1, description="CPUs that a job asks for with each slot.")
    mem_per_node: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$"), Expected("a size such as 16G")] | None = Field(
        default=None, description="Memory that a job asks for on each node; null: the pool's default."
    )
    time_limit: TimeLimit = Field(default=None, description="The time limit where an experiment sets none.")
    max_time_limit: TimeLimit = Field(default=None, description="The longest time limit that is granted.")
    # slurm.conf(5), MaxArraySize
    max_array_size: Positive = Field(default=1001, description="Elements of a job array; larger ones are divided.")
    preempt_mode: PreemptMode | None = Field(
        default=None, description="What becomes of preempted jobs: off (there are none), requeue, cancel or suspend."
    )
    grace_time_s: NotNegative | None = Field(
        default=None, description="Seconds between the notice of a preemption and the job's end."
    )
    signal_lead_s: Positive = Field(default=90, description="How long before the time limit the trial is told to save.")
    account: OptionalText = Field(default=None, description="Who pays.")
    qos: OptionalText = Field(default=None, description="The quality of service that is asked for.")
    pools: Annotated[
        dict[Text, Pool],
        AfterValidator(_at_most_one_default),
        Expected("a map of pool names to what each has of its own, at most one of them the default"),
    ] = Field(default={}, description="What partitions or queues have of their own; then no others may be named.")
    containers: Containers = Field(default=Containers(), description="How the site starts containers.")
    scratch: Annotated[str, Field(pattern=r"^[/$]"), Expected("an absolute path, or one that begins with $")] | None = (
        Field(
            default=None,
            description="A folder of each node's own; it may name variables of the job. Ranks get a folder in it as "
            "$TMPDIR, which is gone after the attempt.",
        )
    )
    modules: Annotated[list[Text], Expected("a list of module names")] = Field(
        default=[], description="Modules that the job loads."
    )
    # The site's own shell, run in the job before anything else: the one setting that is code and not data.
    setup: Annotated[Texts, Expected("a list of shell lines")] = Field(
        default=[], description="Shell lines that the job runs before anything else."
    )
    environment_variables: Variables = Field(default=[], description="NAME=value, for the ranks.")
    srun_args: Texts = Field(default=[], description="More flags of srun, such as --mpi=none.")
    start_agents_with: StartAgents = Field(
        default="pbsdsh", description="How PBS starts a process on every node of a job: pbsdsh, pbs_tmrsh or mpiexec."
    )
    mpi_launcher: Annotated[list[Text], Field(min_length=1), Expected("a command and its flags")] = Field(
        default=["mpirun"],
        description="What hpc_det.launch.mpi starts ranks with: mpirun, mpiexec, or srun with its --mpi flag.",
    )
    dtrain_network_interface: OptionalText = Field(
        default=None, description="The network interface of distributed training; null: one that leads to other nodes."
    )
    resume: Resume = Field(
        default="auto",
        description="How a trial whose job was preempted or timed out comes back: requeue (rerun on PBS) keeps the "
        "job; successor queues the next job when one starts, resubmit when it ends, chain several at the submission; "
        "auto takes the fastest that the site allows.",
    )
    chain_length: Positive = Field(default=3, description="How many jobs `resume: chain` queues behind the first.")
    nodes_can_submit: Flag = Field(
        default=True, description="Whether jobs may submit jobs: sbatch or qsub work on compute nodes."
    )
    health_checks: Flag = Field(
        default=True, description="Whether nodes are checked before each attempt: devices, memory, folders, the clock."
    )
    exclude_nodes_for: TimeLimit = Field(
        default="24:00:00", description="How long jobs keep away from a node that was lost or failed its checks."
    )

    @property
    def has_queue(self) -> bool:
        return self.scheduler != "local"

    @property
    def max_time_limit_min(self) -> int | None:
        """In minutes, rounded up."""
        return time_limit_min(self.max_time_limit) if self.max_time_limit else None

    @property
    def exclude_nodes_for_min(self) -> int:
        """In minutes, rounded up; 0: not at all."""
        return time_limit_min(self.exclude_nodes_for) if self.exclude_nodes_for else 0

    @property
    def preemption_grace_s(self) -> int | None:
        """Seconds that a preempted job has for its save; None: unknown, or jobs are never preempted.

        Profiles made from what a scheduler reports have a grace_time_s for pools that preempt nobody, too.
        """
        return self.grace_time_s if self.preempt_mode in ("requeue", "cancel") else None

    def in_pool(self, name: str | None) -> Cluster:
        """The profile as the pool `name` changes it; None stands for the default pool, and an unknown one for none."""
        pool = self.pools.get(name) if name else next((pool for pool in self.pools.values() if pool.default), None)
        if pool is None:
            return self
        return self.model_copy(update={**pool.model_dump(exclude_none=True, exclude={"default"}), "pools": {}})
