"""What a cluster profile may say: keys, types, defaults."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpc_det.config.fields import OptionalText, Positive, Section, Text, Texts, TimeLimit, Variables


class Cluster(Section):
    """A site's profile."""

    name: Annotated[Text, Field(description="the name of the cluster")]
    scheduler: Annotated[Literal["slurm", "local"], Field(description="slurm or local")]
    slots_per_node: Positive
    slot_type: Annotated[Literal["gpu", "cpu"], Field(description="gpu or cpu")]
    max_nodes: Annotated[int | None, Field(ge=1, description="how many nodes a job can have, >= 1")] = None
    resource_pool: OptionalText = None
    gpu_flag: Annotated[Literal["gpus-per-node", "gres"], Field(description="gpus-per-node or gres")] = "gpus-per-node"
    gpu_type: Annotated[
        str | None,
        Field(pattern=r"^[A-Za-z0-9_.-]+$", description="a GPU type as the scheduler names it, such as a100"),
    ] = None
    cpus_per_slot: Positive = 1
    mem_per_node: Annotated[str | None, Field(pattern=r"^[0-9]+[KMGT]?$", description="a size such as 16G")] = None
    time_limit: TimeLimit = None
    signal_lead_s: Positive = 90
    account: OptionalText = None
    qos: OptionalText = None
    modules: Annotated[list[Text], Field(description="a list of module names")] = []
    # The site's own shell, run in the job before anything else: the one setting that is code and not data.
    setup: Annotated[Texts, Field(description="a list of shell lines")] = []
    environment_variables: Variables = []
    srun_args: Texts = []
    max_array_size: Positive = 1001

    @property
    def has_queue(self) -> bool:
        return self.scheduler != "local"
