"""The schema of a cluster profile: keys, types, defaults."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from hpc_det.config.fields import (
    Expected,
    Flag,
    GpuType,
    Memory,
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
MaxNodes: TypeAlias = Annotated[int, Field(ge=1), Expected("a number of nodes >= 1")]
PreemptMode: TypeAlias = Annotated[
    Literal["off", "requeue", "cancel", "suspend"],
    Expected("off (jobs are not preempted), requeue, cancel or suspend"),
]

GpuFlag: TypeAlias = Annotated[
    Literal["gpus-per-node", "gres", "tres-per-node"], Expected("gpus-per-node, gres or tres-per-node")
]
StartAgents: TypeAlias = Annotated[Literal["pbsdsh", "pbs_tmrsh", "mpiexec"], Expected("pbsdsh, pbs_tmrsh or mpiexec")]
ResourceName: TypeAlias = Annotated[
    str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$"), Expected("the name of a resource, such as qos")
]
Resume: TypeAlias = Annotated[
    Literal["auto", "requeue", "rerun", "successor", "resubmit", "chain"],
    Expected("auto, requeue (rerun on PBS), successor, resubmit or chain"),
]


class Pool(Section):
    """A partition or queue; its values override those of the profile."""

    default: Flag = Field(
        default=False, description="Whether jobs that name no pool go to this one. At most one pool is the default."
    )
    slots_per_node: Positive | None = Field(default=None, description="Overrides the profile's value in this pool.")
    slot_type: SlotType | None = Field(default=None, description="Overrides the profile's value in this pool.")
    cpus_per_slot: Positive | None = Field(default=None, description="Overrides the profile's value in this pool.")
    max_cpus_per_node: Positive | None = Field(default=None, description="Overrides the profile's value in this pool.")
    max_memory_per_node: Memory | None = Field(default=None, description="Overrides the profile's value in this pool.")
    max_nodes: MaxNodes | None = Field(default=None, description="Overrides the profile's value in this pool.")
    gpu_type: GpuType | None = Field(default=None, description="Overrides the profile's value in this pool.")
    max_time_limit: TimeLimit = Field(default=None, description="Overrides the profile's value in this pool.")
    preempt_mode: PreemptMode | None = Field(default=None, description="Overrides the profile's value in this pool.")
    grace_time_s: NotNegative | None = Field(default=None, description="Overrides the profile's value in this pool.")


def _at_most_one_default(pools: dict[str, Pool]) -> dict[str, Pool]:
    if sum(pool.default for pool in pools.values()) > 1:
        raise ValueError
    return pools


class Containers(Section):
    """The site's container runtime, for experiments that name an image."""

    runtime: Annotated[Literal["apptainer", "podman", "pyxis"], Expected("apptainer, podman or pyxis")] | None = Field(
        default=None, description="apptainer, podman, or pyxis (a Slurm plugin); null: the site has none."
    )
    args: Texts = Field(
        default=[],
        description="Additional flags of `apptainer exec` or `podman run`; with pyxis, additional `--container-...` "
        "flags of srun.",
    )


class Cluster(Section):
    """The profile of a cluster."""

    name: Annotated[Text, Expected("the name of the cluster")] = Field(
        description="Name of the cluster, as messages show it."
    )
    scheduler: Annotated[Literal["slurm", "local", "pbs"], Expected("slurm, pbs or local")] = Field(
        description="slurm, pbs, or local (this machine, without a queue)."
    )
    slots_per_node: Positive = Field(
        description="Number of slots of a node: its GPUs, or the ranks to run on a node without GPUs. With `scheduler: "
        "local`, if unset: the GPUs of this machine, or 2 ranks on CPUs if a trial has more slots than there are GPUs."
    )
    slot_type: SlotType = Field(
        description="Kind of a slot: gpu or cpu. With `scheduler: local`, if unset: gpu if there are as many GPUs as a "
        "trial has slots, else cpu."
    )
    max_nodes: MaxNodes | None = Field(default=None, description="Most nodes that a job can have; null: not checked.")
    resource_pool: OptionalText = Field(
        default=None,
        description="Pool of experiments that name none; null: the one with `default: true`, or else the scheduler's "
        "default.",
    )
    gpu_flag: GpuFlag = Field(
        default="gpus-per-node",
        description="Option of sbatch that requests GPUs: gpus-per-node, gres or tres-per-node.",
    )
    gpu_type: GpuType | None = Field(default=None, description="GPU type to request, such as a100; null: any.")
    cpus_per_slot: Positive = Field(default=1, description="CPUs to request for each slot.")
    max_cpus_per_node: Positive | None = Field(
        default=None, description="Most CPUs of a node that `resources.cpus_per_slot` may request; null: not checked."
    )
    mem_per_node: Annotated[str, Field(pattern=r"^[0-9]+[KMGT]?$"), Expected("a size such as 16G")] | None = Field(
        default=None, description="Memory to request on each node, such as 16G; null: the pool's default."
    )
    max_memory_per_node: Memory | None = Field(
        default=None,
        description="Most memory of a node that `resources.memory_per_slot` may request, such as 480G; null: not "
        "checked.",
    )
    time_limit: TimeLimit = Field(
        default=None,
        description="Time limit of experiments that set none, as HH:MM:SS, D-HH:MM:SS or minutes; null: the "
        "scheduler's default.",
    )
    max_time_limit: TimeLimit = Field(
        default=None, description="Longest time limit that an experiment may request; null: not checked."
    )
    # The default of MaxArraySize in slurm.conf(5).
    max_array_size: Positive = Field(
        default=1001, description="Most elements of a job array; more jobs are divided over several arrays."
    )
    preempt_mode: PreemptMode | None = Field(
        default=None,
        description="Effect of a preemption on a job: off (jobs are not preempted), requeue, cancel or suspend; null: "
        "unknown.",
    )
    grace_time_s: NotNegative | None = Field(
        default=None,
        description="Seconds between the notice of a preemption and the end of the job. 0: no grace time; null: "
        "unknown.",
    )
    signal_lead_s: Positive = Field(
        default=90,
        description="Seconds before the time limit at which the trial is asked to save and stop; earlier if the "
        "trial's saves were measured to take longer.",
    )
    account: OptionalText = Field(
        default=None, description="Account that jobs are charged to; null: the scheduler's default."
    )
    allowed_accounts: Annotated[list[Text], Expected("a list of accounts")] = Field(
        default=[], description="Accounts that `resources.account` may name; empty: not checked."
    )
    qos: OptionalText = Field(
        default=None,
        description="Quality of service of jobs; null: the scheduler's default. On PBS only with `qos_resource`.",
    )
    allowed_qos: Annotated[list[Text], Expected("a list of qualities of service")] = Field(
        default=[], description="Qualities of service that `resources.qos` may name; empty: not checked."
    )
    qos_resource: ResourceName | None = Field(
        default=None,
        description="Resource that stands for a quality of service on a PBS site, such as qos for `-l qos=high`; null: "
        "none, and `resources.qos` is an error.",
    )
    allowed_constraints: Annotated[list[Text], Expected("a list of features of nodes")] = Field(
        default=[], description="Features that `resources.constraint` may name; empty: not checked."
    )
    pools: Annotated[
        dict[Text, Pool],
        AfterValidator(_at_most_one_default),
        Expected("a map of pool names to the settings of each pool, at most one of them the default"),
    ] = Field(
        default={},
        description="Settings of partitions or queues, by name. If any are listed, experiments can use no others.",
    )
    containers: Containers = Field(default=Containers(), description="Container runtime of the site.")
    scratch: Annotated[str, Field(pattern=r"^[/$]"), Expected("an absolute path, or one that begins with $")] | None = (
        Field(
            default=None,
            description="Folder on each node's local disk; variables of the job in its path are expanded. Each attempt "
            "gets a subfolder as $TMPDIR of its ranks, which is deleted after the attempt. null: none.",
        )
    )
    modules: Annotated[list[Text], Expected("a list of module names")] = Field(
        default=[], description="Environment modules that the job loads."
    )
    # The only setting that is code and not data: the lines go into the job script unquoted.
    setup: Annotated[Texts, Expected("a list of shell lines")] = Field(
        default=[], description="Shell lines that the job runs after it has loaded the modules."
    )
    startup_hook: Flag = Field(
        default=True,
        description="Whether the node agents source a `startup-hook.sh` of the context directory before the "
        "entrypoint; false: an experiment with such a file is refused.",
    )
    environment_variables: Variables = Field(default=[], description="Variables of the ranks, as NAME=value.")
    srun_args: Texts = Field(default=[], description="Additional flags of srun, such as --mpi=none.")
    start_agents_with: StartAgents = Field(
        default="pbsdsh",
        description="Command that starts the node agents of a PBS job: pbsdsh, pbs_tmrsh or mpiexec.",
    )
    mpi_launcher: Annotated[list[Text], Field(min_length=1), Expected("a command and its flags")] = Field(
        default=["mpirun"],
        description="Command, with its flags, that starts the ranks of hpc_det.launch.mpi: mpirun, mpiexec, or srun "
        "with its --mpi flag.",
    )
    dtrain_network_interface: OptionalText = Field(
        default=None,
        description="Network interface for communication between ranks; null: detect one that reaches the other nodes.",
    )
    resume: Resume = Field(
        default="auto",
        description="Policy by which a trial runs again after its job was preempted or reached its time limit. requeue "
        "(rerun on PBS): the scheduler requeues the job; successor: each job submits the next one when it starts; "
        "resubmit: when it ends; chain: all are submitted at the beginning; auto: the fastest that the site allows.",
    )
    chain_length: Positive = Field(default=3, description="Jobs that `resume: chain` submits in addition to the first.")
    nodes_can_submit: Flag = Field(default=True, description="Whether sbatch or qsub works on compute nodes.")
    health_checks: Flag = Field(
        default=True, description="Whether to check nodes before each attempt: devices, memory, folders, the clock."
    )
    exclude_nodes_for: TimeLimit = Field(
        default="24:00:00", description="Time for which jobs avoid a node that was lost or failed its health checks."
    )

    @property
    def has_queue(self) -> bool:
        return self.scheduler != "local"

    @property
    def usual_pool(self) -> str | None:
        """The pool of jobs that name none; None: the scheduler's default."""
        return self.resource_pool or next((name for name, pool in self.pools.items() if pool.default), None)

    @property
    def max_time_limit_min(self) -> int | None:
        """The longest time limit in minutes, rounded up; None if it is not checked."""
        return time_limit_min(self.max_time_limit) if self.max_time_limit else None

    @property
    def exclude_nodes_for_min(self) -> int:
        """Minutes for which jobs avoid such a node, rounded up; 0 if nodes are not excluded."""
        return time_limit_min(self.exclude_nodes_for) if self.exclude_nodes_for else 0

    @property
    def preemption_grace_s(self) -> int | None:
        """Seconds that a preempted job has for its save; None if unknown, or if jobs are not preempted."""
        # Profiles made by `cluster detect` have a grace_time_s even for pools that preempt no jobs.
        return self.grace_time_s if self.preempt_mode in ("requeue", "cancel") else None

    def in_pool(self, name: str | None) -> Cluster:
        """Return the profile with the values of the pool `name`, of the default pool if `name` is None.

        A name that the profile does not list leaves the profile unchanged.
        """
        pool = self.pools.get(name) if name else next((pool for pool in self.pools.values() if pool.default), None)
        if pool is None:
            return self
        return self.model_copy(update={**pool.model_dump(exclude_none=True, exclude={"default"}), "pools": {}})
