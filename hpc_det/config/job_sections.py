"""What an experiment says about its jobs: slots, the scheduler's own flags, containers and variables."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from hpc_det.config.fields import (
    AboveZero,
    AbsolutePath,
    DeviceText,
    DeviceVariables,
    Expected,
    Flag,
    FreeMap,
    GpuType,
    OptionalText,
    PbsbatchArgs,
    Port,
    Positive,
    Propagation,
    SbatchArgs,
    Size,
    Text,
    Texts,
    TimeLimit,
    time_limit_min,
)
from hpc_det.config.merge import device_of_text
from hpc_det.config.section import Section


class ContainerDevice(Section):
    """A device file that a container sees."""

    host_path: AbsolutePath = Field(description="Its path on the node.")
    container_path: AbsolutePath = Field(description="Its path in the container.")
    mode: Text = Field(default="mrw", description="What the container may do: m, r and w.")


def _device(value: Any) -> Any:
    return device_of_text(value) if isinstance(value, str) else value


_DeviceText = Annotated[str, Field(pattern=r"^/[^:]+:/[^:]+(:[mrw]+)?$")]
_Device = Annotated[ContainerDevice, BeforeValidator(_device, json_schema_input_type=ContainerDevice | _DeviceText)]


class Resources(Section):
    slots_per_trial: Annotated[
        Positive, Expected("a whole number >= 1; slots are CPUs where the cluster profile says slot_type: cpu")
    ] = Field(default=1, description="How many slots a trial trains on, each with a process of its own.")
    max_slots: Positive | None = Field(
        default=None, description="How many slots all trials of the experiment have together, at most."
    )
    packed_slots: Positive | None = Field(
        default=None,
        description="One job with so many slots runs trial after trial, instead of a job for each: a multiple of "
        "slots_per_trial.",
    )
    resource_pool: OptionalText = Field(default=None, description="The partition or queue.")
    time_limit: TimeLimit = Field(default=None, description="How long a job may run before it is queued again.")
    weight: AboveZero = Field(default=1, description="Determined's share of a pool.")
    priority: Annotated[int, Field(ge=1, le=99), Expected("a whole number from 1 to 99")] | None = Field(
        default=None,
        description="The place in the queue, from 1 to 99, lower is earlier; 42 is that of jobs that say nothing.",
    )
    shm_size: Size | None = Field(default=None, description="The size of /dev/shm in a container.")
    devices: Annotated[
        list[_Device], Expected("a list of host_path:container_path[:mode], or of maps with these keys")
    ] = Field(default=[], description="Device files that a container sees.")
    native_parallel: Flag = Field(default=False, description="A switch of Determined's old trials.")
    is_single_node: Flag = Field(default=False, description="All slots of a trial have to be on one node.")
    agent_label: str | None = Field(default=None, description="Determined's old name for a pool.")

    @property
    def time_limit_min(self) -> int | None:
        """The limit in minutes, rounded up."""
        return time_limit_min(self.time_limit) if self.time_limit else None


class ProxyPort(Section):
    proxy_port: Port = Field(description="The port.")
    proxy_tcp: Flag = Field(default=False, description="Whether it speaks plain TCP.")
    unauthenticated: Flag = Field(default=False, description="Whether anyone may reach it.")


class Environment(Section):
    image: DeviceText | None = Field(
        default=None, description="The container image; without one, ranks run in the Python that hpc-det runs in."
    )
    environment_variables: DeviceVariables = Field(
        default=[], description="Variables of the ranks; the last of a name counts."
    )
    force_pull_image: Flag = Field(default=False, description="Fetch the image although the node has it.")
    registry_auth: FreeMap | None = Field(default=None, description="Who may fetch the image.")
    add_capabilities: Texts = Field(default=[], description="Linux capabilities that Docker adds.")
    drop_capabilities: Texts = Field(default=[], description="Linux capabilities that Docker takes away.")
    ports: Annotated[dict[str, Port], Expected("a map of names to ports from 1 to 65535")] = Field(
        default={}, description="Ports of a container."
    )
    proxy_ports: Annotated[list[ProxyPort], Expected("a list of maps with proxy_port")] = Field(
        default=[], description="Ports that Determined's master passes on."
    )
    pod_spec: FreeMap | None = Field(default=None, description="A pod of Kubernetes.")

    def variables(self, slot_type: str) -> list[str]:
        """NAME=value for ranks on slots of this type."""
        if isinstance(self.environment_variables, list):
            return self.environment_variables
        return self.environment_variables.get("cuda" if slot_type == "gpu" else "cpu", [])

    def image_for(self, slot_type: str) -> str | None:
        """The image for ranks on slots of this type."""
        if isinstance(self.image, dict):
            return self.image.get("cuda" if slot_type == "gpu" else "cpu")
        return self.image


class BindMount(Section):
    host_path: AbsolutePath = Field(description="A path on the node.")
    container_path: Annotated[Text, Expected("a path in the container, absolute or below the work directory")] = Field(
        description="Where the container sees it; relative to the directory in which the ranks run."
    )
    read_only: Flag = Field(default=False, description="Whether the container may only read it.")
    propagation: Propagation = Field(default="rprivate", description="How later mounts reach the container.")


class _SchedulerSection(Section):
    slots_per_node: Positive | None = Field(default=None, description="Instead of the cluster profile's.")
    gpu_type: GpuType | None = Field(default=None, description="Instead of the cluster profile's.")


class Slurm(_SchedulerSection):
    sbatch_args: SbatchArgs = Field(default=[], description="More arguments of sbatch.")


class Pbs(_SchedulerSection):
    pbsbatch_args: PbsbatchArgs = Field(default=[], description="More arguments of qsub.")
