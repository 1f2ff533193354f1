"""The sections of an experiment file about its jobs: slots, flags of the scheduler, containers and variables."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from hpc_det.config.fields import (
    AboveZero,
    AbsolutePath,
    Constraint,
    DeviceText,
    DeviceVariables,
    Expected,
    Flag,
    FreeMap,
    GpuType,
    Memory,
    OptionalText,
    PbsbatchArgs,
    Port,
    Positive,
    Propagation,
    SbatchArgs,
    Size,
    Stage,
    Text,
    Texts,
    TimeLimit,
    time_limit_min,
)
from hpc_det.config.merge import device_of_text, same_folder
from hpc_det.config.section import Section


class ContainerDevice(Section):
    """A device file of the node that is available in the container."""

    host_path: AbsolutePath = Field(description="Path on the node.")
    container_path: AbsolutePath = Field(description="Path in the container.")
    mode: Text = Field(default="mrw", description="Permissions in the container: letters of m (mknod), r and w.")


def _device(value: Any) -> Any:
    return device_of_text(value) if isinstance(value, str) else value


_Pool: TypeAlias = Annotated[
    str | None,
    AfterValidator(lambda pool: pool or None),  # the default of Determined is ""
    Field(pattern=r"^$|\S"),
    Expected("the name of a partition or queue"),
]
_DeviceText = Annotated[str, Field(pattern=r"^/[^:]+:/[^:]+(:[mrw]+)?$")]
_Device = Annotated[ContainerDevice, BeforeValidator(_device, json_schema_input_type=ContainerDevice | _DeviceText)]


class Resources(Section):
    slots_per_trial: Annotated[
        Positive, Expected("a whole number >= 1; slots are CPUs where the cluster profile has slot_type: cpu")
    ] = Field(
        default=1,
        description="Number of slots that a trial trains on. A slot is a GPU, or a share of the CPUs of a cluster "
        "without GPUs; on each runs one process of the trial (rank).",
    )
    max_slots: Positive | None = Field(
        default=None, description="Most slots that all trials of the experiment use together; null: no limit."
    )
    packed_slots: Positive | None = Field(
        default=None,
        description="Number of slots of one job that runs all trials, as many at a time as its slots allow; a multiple "
        "of slots_per_trial. null: one job per trial.",
    )
    resource_pool: _Pool = Field(
        default=None,
        description="Partition or queue in which jobs run; null: the cluster profile's, or the scheduler's default.",
    )
    time_limit: TimeLimit = Field(
        default=None,
        description="Time limit of a job, after which the trial is requeued; null: the cluster profile's, or the "
        "scheduler's default.",
    )
    cpus_per_slot: Positive | None = Field(
        default=None, description="CPUs to request for each slot; null: the cluster profile's."
    )
    memory_per_slot: Memory | None = Field(
        default=None,
        description="Memory to request for each slot, such as 16G; null: the cluster profile's `mem_per_node`.",
    )
    account: OptionalText = Field(
        default=None, description="Account that jobs are charged to; null: the cluster profile's."
    )
    qos: OptionalText = Field(
        default=None,
        description="Quality of service of jobs; null: the cluster profile's. On PBS only if the profile has "
        "`qos_resource`.",
    )
    constraint: Constraint | None = Field(
        default=None,
        description="Features that nodes must have, such as nvlink: `--constraint` of sbatch. On PBS, resources of a "
        "chunk joined by &: `nvlink&cpu_type=milan` requests `nvlink=True:cpu_type=milan`.",
    )
    weight: AboveZero = Field(default=1, description="Share of a pool in Determined.")
    priority: Annotated[int, Field(ge=1, le=99), Expected("a whole number from 1 to 99")] | None = Field(
        default=None,
        description="Priority in the queue, from 1 (first) to 99 (last); null is the same as 42, the scheduler's "
        "default.",
    )
    shm_size: Size | None = Field(
        default=None, description="Size of /dev/shm in the container, in bytes or with a unit; null: the node's."
    )
    devices: Annotated[
        list[_Device], Expected("a list of host_path:container_path[:mode], or of maps with these keys")
    ] = Field(default=[], description="Device files that are available in the container.")
    native_parallel: Flag = Field(default=False, description="A switch for older trials of Determined.")
    is_single_node: Flag = Field(
        default=False, description="Refuse an experiment whose slots_per_trial do not fit on one node."
    )
    agent_label: str | None = Field(default=None, description="Determined's former name for a pool.")

    @property
    def time_limit_min(self) -> int | None:
        """The time limit in minutes, rounded up; None if the experiment sets none."""
        return time_limit_min(self.time_limit) if self.time_limit else None


class Launch(Section):
    nursery: Flag = Field(
        default=True,
        description="Whether the launcher `direct` imports torch once per node and forks the ranks, which share the "
        "memory of the imports. false: each rank imports torch separately.",
    )
    preload: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]],
        Expected("a list of Python modules, such as transformers"),
    ] = Field(
        default=[],
        description="More modules that the launcher imports before it forks. They must start no thread and query no "
        "GPU at their import; otherwise each rank imports everything separately, and a note names the reason.",
    )


class ProxyPort(Section):
    proxy_port: Port = Field(description="Number of the port.")
    proxy_tcp: Flag = Field(default=False, description="Whether the service uses plain TCP.")
    default_service_id: Flag = Field(default=False, description="Whether the service has the ID of its task.")
    unauthenticated: Flag = Field(default=False, description="Whether the service needs no authentication.")


class Environment(Section):
    image: DeviceText | None = Field(
        default=None,
        description="Container image: a path, an address with ://, or a name as Docker writes it. null: ranks run "
        "without a container, in the Python environment of hpc-det.",
    )
    environment_variables: DeviceVariables = Field(
        default=[],
        description="Environment variables of the ranks. If a name occurs several times, the last value is used.",
    )
    force_pull_image: Flag = Field(default=False, description="Pull the image even if the node has it.")
    registry_auth: FreeMap | None = Field(
        default=None, description="Credentials for the image registry; masked wherever the configuration is shown."
    )
    add_capabilities: Texts = Field(default=[], description="Linux capabilities that Docker adds to the container.")
    drop_capabilities: Texts = Field(
        default=[], description="Linux capabilities that Docker removes from the container."
    )
    ports: Annotated[dict[str, Port], Expected("a map of names to ports from 1 to 65535")] = Field(
        default={}, description="Ports of the container."
    )
    proxy_ports: Annotated[list[ProxyPort], Expected("a list of maps with proxy_port")] = Field(
        default=[], description="Ports that Determined's master forwards."
    )
    pod_spec: FreeMap | None = Field(default=None, description="Specification of a Kubernetes pod.")
    bundle: Flag = Field(
        default=False,
        description="Import installed packages from one file, which is written at submission and then used again until "
        "a package changes. It replaces thousands of accesses to a shared file system. No effect with `image`.",
    )
    stage: Stage = Field(
        default="none",
        description="Copy the Python environment to each node's local disk, once per node, and run agents and ranks "
        "from there: `tar` unpacks a tar file, `image` mounts a squashfs image. No effect with `image`, the container.",
    )

    def variables(self, slot_type: str) -> list[str]:
        """Return the variables, as NAME=value, of ranks on slots of type "gpu" or "cpu"."""
        if isinstance(self.environment_variables, list):
            return self.environment_variables
        # The maps are keyed by device, as in Determined: its name for a GPU slot is cuda.
        return self.environment_variables.get("cuda" if slot_type == "gpu" else "cpu", [])

    def image_for(self, slot_type: str) -> str | None:
        """Return the container image of ranks on slots of type "gpu" or "cpu", or None."""
        if isinstance(self.image, dict):
            return self.image.get("cuda" if slot_type == "gpu" else "cpu")
        return self.image


def _not_the_work_directory(path: str) -> str:
    if same_folder(path) == ".":
        raise ValueError
    return path


class BindMount(Section):
    host_path: AbsolutePath = Field(description="Path on the node.")
    container_path: Annotated[
        Text,
        AfterValidator(_not_the_work_directory),
        Expected("a path in the container, absolute or below the work directory"),
    ] = Field(description="Path in the container; a relative path is below the working directory of the ranks.")
    read_only: Flag = Field(default=False, description="Mount the path read-only.")
    propagation: Propagation = Field(
        default="rprivate", description="Propagation of later mounts below the path, as in mount(8)."
    )


class _SchedulerSection(Section):
    slots_per_node: Positive | None = Field(default=None, description="Overrides the cluster profile's value.")
    gpu_type: GpuType | None = Field(default=None, description="Overrides the cluster profile's value.")


class Slurm(_SchedulerSection):
    sbatch_args: SbatchArgs = Field(
        default=[], description="Additional arguments of sbatch. Those that hpc_det sets itself are refused."
    )


class Pbs(_SchedulerSection):
    pbsbatch_args: PbsbatchArgs = Field(
        default=[], description="Additional arguments of qsub. Those that hpc_det sets itself are refused."
    )
