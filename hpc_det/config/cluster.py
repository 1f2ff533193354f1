"""What a cluster profile may say: keys, types, defaults."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from hpc_det.config.fields import (
    Flag,
    OptionalText,
    Positive,
    Section,
    Text,
    Texts,
    TimeLimit,
    Variables,
    time_limit_min,
)

SlotType: TypeAlias = Annotated[Literal["gpu", "cpu"], Field(description="gpu or cpu")]
MaxNodes: TypeAlias = Annotated[int | None, Field(ge=1, description="how many nodes a job can have, >= 1")]
GpuType: TypeAlias = Annotated[
    str | None,
    Field(pattern=r"^[A-Za-z0-9_.-]+$", description="a GPU type as the scheduler names it, such as a100"),
]
PreemptMode: TypeAlias = Annotated[
    Literal["off", "requeue", "cancel", "suspend"] | None,
    Field(description="what becomes of preempted jobs: off (there are none), requeue, cancel or suspend"),
]
OptionalSeconds: TypeAlias = Annotated[int | None, Field(ge=0, description="a whole number of seconds, >= 0")]


class Pool(Section):
    """A partition or queue. What it says comes before what the profile says of all pools."""

    default: Flag = False
    slots_per_node: Annotated[int | None, Field(ge=1, description="a whole number >= 1")] = None
    slot_type: Annotated[Literal["gpu", "cpu"] | None, Field(description="gpu or cpu")] = None
    max_nodes: MaxNodes = None
    gpu_type: GpuType = None
    cpus_per_slot: Annotated[int | None, Field(ge=1, description="a whole number >= 1")] = None
    max_time_limit: TimeLimit = None
    preempt_mode: PreemptMode = None
    grace_time_s: OptionalSeconds = None


def _at_most_one_default(pools: dict[str, Pool]) -> dict[str, Pool]:
    if sum(pool.default for pool in pools.values()) > 1:
        raise ValueError
    return pools


class Containers(Section):
    """How the site starts a container, for experiments that name an image."""

    runtime: Annotated[
        Literal["apptainer", "podman", "pyxis"] | None, Field(description="apptainer, podman, pyxis or null")
    ] = None
    args: Texts = []


class Cluster(Section):
    """A site's profile."""

    name: Annotated[Text, Field(description="the name of the cluster")]
    scheduler: Annotated[Literal["slurm", "local", "pbs"], Field(description="slurm or local")]
    slots_per_node: Positive
    slot_type: SlotType
    max_nodes: MaxNodes = None
    resource_pool: OptionalText = None
    gpu_flag: Annotated[Literal["gpus-per-node", "gres"], Field(description="gpus-per-node or gres")] = "gpus-per-node"
    gpu_type: GpuType = None
    cpus_per_slot: Positive = 1
    mem_per_node: Annotated[str | None, Field(pattern=r"^[0-9]+[KMGT]?$", description="a size such as 16G")] = None
    time_limit: TimeLimit = None
    max_time_limit: TimeLimit = None
    max_array_size: Positive = 1001  # Slurm's default, slurm.conf(5)
    preempt_mode: PreemptMode = None
    grace_time_s: OptionalSeconds = None
    signal_lead_s: Positive = 90
    account: OptionalText = None
    qos: OptionalText = None
    pools: Annotated[
        dict[Text, Pool],
        AfterValidator(_at_most_one_default),
        Field(description="a map of pool names to what each has of its own, at most one of them the default"),
    ] = {}
    containers: Containers = Containers()
    scratch: Annotated[
        str | None, Field(pattern=r"^[/$]", description="an absolute path, or one that begins with $")
    ] = None
    modules: Annotated[list[Text], Field(description="a list of module names")] = []
    # The site's own shell, run in the job before anything else: the one setting that is code and not data.
    setup: Annotated[Texts, Field(description="a list of shell lines")] = []
    environment_variables: Variables = []
    srun_args: Texts = []

    @property
    def max_time_limit_min(self) -> int | None:
        """In minutes, rounded up."""
        return time_limit_min(self.max_time_limit) if self.max_time_limit else None

    def in_pool(self, name: str | None) -> Cluster:
        """The profile as the pool `name` changes it; None stands for the default pool, and an unknown one for none."""
        pool = self.pools.get(name) if name else next((pool for pool in self.pools.values() if pool.default), None)
        if pool is None:
            return self
        return self.model_copy(update={**pool.model_dump(exclude_none=True, exclude={"default"}), "pools": {}})
