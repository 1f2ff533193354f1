"""The container of a node: the image that ranks run in, requests that a cluster cannot serve, and the command line.

apptainer and podman get an argument list, pyxis flags of srun. The ranks of a node share one container. Besides the
content of the image they see the experiment's folder, the agent's private folder with the socket, the node's scratch
folder, hpc_det below HPC_DET, and the experiment's mounts. An image needs Python 3.10 or newer and torch, but not
hpc_det. No value of the environment is on a command line, where other users could read it: a file of mode 0600 in the
private folder contains them, and the first process in the container reads it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.config.merge import same_folder
from hpc_det.node.files import write_atomic
from hpc_det.plan.job_plan import Container, Device, JobPlan, Mount

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.job_sections import BindMount
    from hpc_det.config.schema import Experiment

_NO_SHM_SIZE = ("apptainer", "pyxis")
"""Runtimes in which /dev/shm is the node's."""


def container(experiment: Experiment, cluster: Cluster, code: str) -> Container | None:
    """Return the container of an experiment; None without an image for slots of this type.

    Relative paths in the container are below `code`, the working directory of the ranks.
    """
    image, runtime = _image(experiment, cluster), cluster.containers.runtime
    if image is None or runtime is None:
        return None
    return Container(
        runtime=runtime,
        image=image,
        mounts=(*_storage(experiment, cluster), *_bind_mounts(experiment, code)),
        devices=tuple(
            Device(source=device.host_path, target=device.container_path, mode=device.mode)
            for device in experiment.resources.devices
        ),
        shm_size=experiment.resources.shm_size,
        args=tuple(cluster.containers.args),
    )


def _image(experiment: Experiment, cluster: Cluster) -> str | None:
    """Return the image for slots of the cluster; None without one, and for Determined's default image on a cluster
    without containers.
    """
    from hpc_det.config.determined_keys import is_default_image  # loads pydantic, which nodes do not need

    image = experiment.environment.image_for(cluster.slot_type)
    return None if image and cluster.containers.runtime is None and is_default_image(image) else image


def _bind_mounts(experiment: Experiment, code: str) -> Iterator[Mount]:
    for mount in experiment.bind_mounts:
        inside = mount.container_path
        yield Mount(
            source=mount.host_path,
            target=inside if inside.startswith("/") else f"{code}/{inside}",
            read_only=mount.read_only,
            propagation=mount.propagation,
        )


def checkpoint_folder(experiment: Experiment, cluster: Cluster) -> Path | None:
    """Return the folder for the checkpoints of all experiments, as nodes see it; None if each trial's folder contains
    its own.
    """
    storage = experiment.checkpoint_storage
    if storage.type == "shared_fs":
        # An absolute storage_path stands for itself: joining leaves out host_path, below which it was checked to lie.
        return Path(storage.host_path) / (storage.storage_path or "")
    if storage.type == "directory":
        folder = Path(storage.container_path)
        mount = _brings(folder, experiment)  # also without a container, so that the files are at the same place
        return Path(mount.host_path) / folder.relative_to(mount.container_path) if mount else folder
    return None


def _brings(folder: Path, experiment: Experiment) -> BindMount | None:
    """Return the mount through which a container sees `folder`, or None."""
    found = [mount for mount in experiment.bind_mounts if folder.is_relative_to(mount.container_path)]
    return max(found, key=lambda mount: len(Path(mount.container_path).parts), default=None)


def _storage(experiment: Experiment, cluster: Cluster) -> Iterator[Mount]:
    """Yield the mount of the checkpoint storage. The path inside equals the one outside, since the trial's folder links
    to it.
    """
    storage, folder = experiment.checkpoint_storage, checkpoint_folder(experiment, cluster)
    if storage.type == "shared_fs":
        yield Mount(
            source=storage.host_path, target=storage.host_path, read_only=False, propagation=storage.propagation
        )
    elif storage.type == "directory" and str(folder) != storage.container_path:
        yield Mount(source=str(folder), target=str(folder), read_only=False, propagation="rprivate")


def container_notes(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yield notes for the user about settings without an effect."""
    image, runtime = _image(experiment, cluster), cluster.containers.runtime
    named = experiment.environment.image_for(cluster.slot_type)
    if named is None and experiment.environment.image is not None:
        yield f"environment.image: none is named for slots of type {cluster.slot_type}; ranks run without a container"
    elif named != image:
        yield (
            f"environment.image: {named!r} is Determined's default, and cluster {cluster.name!r} has no container "
            "runtime: ranks run without a container, in the Python environment of hpc-det"
        )
    if experiment.resources.shm_size is not None and (image is None or runtime in _NO_SHM_SIZE):
        why = "without a container" if image is None else f"with {runtime}"
        yield f"resources.shm_size: has no effect {why}: /dev/shm is the node's"
    if image is None:
        yield from _mounts_without_container(experiment)
    for i, mount in enumerate(experiment.bind_mounts):
        if image is not None and not os.path.exists(mount.host_path):
            yield (
                f"bind_mounts[{i}].host_path: {mount.host_path!r} does not exist on this machine; correct the path, or "
                "check that it exists on the nodes"
            )


def container_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yield a message for each request that the container runtime cannot serve, or would misread or ignore."""
    image = _image(experiment, cluster)
    if image is None:
        return
    yield from _runtime_problems(image, cluster)
    if "://" not in image and image.endswith((".sif", ".sqsh")) and not image.startswith("/"):
        yield f"environment.image: {image!r} is a relative path; give an absolute one, which every node sees"
    for i, mount in enumerate(experiment.bind_mounts):
        where = f"bind_mounts[{i}]"
        if cluster.containers.runtime == "apptainer" and mount.propagation not in ("rprivate", "private"):
            yield f"{where}.propagation: apptainer has no {mount.propagation!r}; leave it at rprivate"
        for path in (mount.host_path, mount.container_path):
            yield from unmountable(where, path)
    for i, device in enumerate(experiment.resources.devices):
        for path in (device.host_path, device.container_path):
            yield from unmountable(f"resources.devices[{i}]", path)
    yield from _storage_problems(experiment, cluster)


def _storage_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    storage = experiment.checkpoint_storage
    if folder := checkpoint_folder(experiment, cluster):
        yield from unmountable("checkpoint_storage", str(folder))
    if storage.type == "directory":
        mount = _brings(Path(storage.container_path), experiment)
        if mount is None or mount.read_only:
            yield (
                f"checkpoint_storage.container_path: {storage.container_path!r} is not in a writable folder of "
                "bind_mounts, so checkpoints would vanish with the container; mount a folder there, or use shared_fs"
            )


def _runtime_problems(image: str, cluster: Cluster) -> Iterator[str]:
    runtime, scratch = cluster.containers.runtime, cluster.scratch
    if runtime is None:
        yield (
            f"environment.image: {image!r} needs a container runtime, and cluster {cluster.name!r} has none; set "
            "containers.runtime in its profile, or use no image: --config environment.image="
        )
    if runtime == "pyxis" and cluster.scheduler != "slurm":
        yield (
            f"cluster.containers.runtime: pyxis is a plugin of Slurm, and the scheduler of cluster {cluster.name!r} is "
            f"{cluster.scheduler}; choose apptainer or podman"
        )
    if runtime == "pyxis" and scratch and not scratch.partition("$")[0].strip("/"):
        yield (
            f"cluster.scratch: {scratch!r} names no folder before its first variable, and pyxis needs one to mount; "
            "write it as a path such as /scratch/$SLURM_JOB_ID"
        )


def unmountable(where: str, path: str) -> Iterator[str]:
    """Yield the problem with a path that cannot be written on a runtime's command line."""
    if found := {":", ","} & set(path):
        yield f"{where}: {path!r} contains {min(found)!r}, which separates paths on a runtime's command line; rename it"


def _mounts_without_container(experiment: Experiment) -> Iterator[str]:
    """Yield a note for each mount with two different paths, which only a container can provide."""
    for i, mount in enumerate(experiment.bind_mounts):
        if same_folder(mount.host_path) != same_folder(mount.container_path):
            yield (
                f"bind_mounts[{i}]: {mount.host_path!r} is {mount.container_path!r} only in a container; set "
                f"environment.image, or let the trial use {mount.host_path!r}"
            )


# --- the command line

HPC_DET = "/opt/hpc-det"
"""Folder on the container's PYTHONPATH; it contains this package and none of the host's other packages."""
PACKAGE = str(Path(__file__).resolve().parents[1])
ENVIRONMENT_FILE = "environment"
"""Name of a file in the agent's private folder."""

# The variables of the job that ranks need in a container, too. All others describe the host: its PATH, libraries and
# modules.
_OF_THE_JOB = re.compile(
    r"(?:SLURM|PBS|PMI|PMIX|CUDA|NVIDIA|ROCR|HIP|NCCL|GLOO|TORCH|OMP|MKL|UCX|FI|HPC_DET)_\w+|(?:HTTPS?|NO)_PROXY|USER",
    re.IGNORECASE,
)

# Runtimes do not pass on ignored signals (see hpc_det.node.process.ignore_stop_signals), so the container's first
# process ignores them again. It reads the environment after the image has set its own variables.
_FIRST_PROCESS = """trap '' TERM INT HUP USR1 USR2; . "$0" || exit; exec "$@\""""


def of_the_job(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the job that also apply inside a container."""
    return {name: value for name, value in env.items() if _OF_THE_JOB.fullmatch(name)}


def environment_file(environment: Mapping[str, str]) -> str:
    """Return a file for sh that sets `environment`, with every value quoted."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())


def inside(search_path: str) -> str:
    """Return a PYTHONPATH of the host as the container needs it: folders of hpc_det are below HPC_DET there."""
    folders = [*search_path.split(os.pathsep), HPC_DET]
    return os.pathsep.join(folder.replace(PACKAGE, f"{HPC_DET}/{Path(PACKAGE).name}") for folder in folders)


def contained(plan: JobPlan, container: Container, folders: Iterable[str]) -> list[str]:
    """Return the command line that runs the entrypoint in `container`.

    `folders`, the agent's private one first, have the same paths inside.
    """
    private, *others = folders
    own = [Mount(source=path, target=path, read_only=False, propagation="rprivate") for path in (private, *others)]
    mounts = [*_mounts(plan), *own, *container.mounts]
    flags = _COMMANDS[container.runtime](plan, container, mounts)
    return [*flags, "/bin/sh", "-c", _FIRST_PROCESS, f"{private}/{ENVIRONMENT_FILE}", *plan.entrypoint]


def srun_flags(plan: JobPlan, container: Container) -> list[str]:
    """Return pyxis' flags of srun (its README): the agent and all its children run in the container."""
    devices = [_device_mount(device) for device in container.devices]
    mounts = [_with(mount, "+") for mount in (*_mounts(plan), *_scratch(plan), *devices, *container.mounts)]
    return [
        f"--container-image={_enroot_image(container.image)}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={plan.code}",
        *container.args,
    ]


def into_container(
    plan: JobPlan, container: Container, environment: Mapping[str, str], folders: Sequence[str]
) -> list[str]:
    """Prepare this node and return the command line of the entrypoint in `container`, as `contained` does.

    A file in the agent's private folder passes `environment` to it.
    """
    make_mount_points(plan, container)
    write_atomic(Path(folders[0], ENVIRONMENT_FILE), environment_file(environment), private=True)
    return contained(plan, container, folders)


def make_mount_points(plan: JobPlan, container: Container) -> None:
    """Create mount points in the code folder, which is itself a mount: runtimes create them only in the image."""
    for mount in container.mounts:
        if mount.target.startswith(f"{plan.code}/"):
            point = Path(mount.target)
            (point if os.path.isdir(mount.source) else point.parent).mkdir(parents=True, exist_ok=True)
            if not point.is_dir():
                point.touch()


def _mounts(plan: JobPlan) -> list[Mount]:
    """Return the mounts of the experiment's folder, with trials, checkpoints and code, and of hpc_det."""
    return [
        Mount(source=plan.folder, target=plan.folder, read_only=False, propagation="rprivate"),
        Mount(source=PACKAGE, target=f"{HPC_DET}/{Path(PACKAGE).name}", read_only=True, propagation="rprivate"),
    ]


def _scratch(plan: JobPlan) -> list[Mount]:
    """Return the mount of the scratch folder, up to the first variable in its path, whose value only the job knows."""
    if not plan.scratch:
        return []
    path, variable, _ = plan.scratch.partition("$")
    fixed = path.rpartition("/")[0] if variable else path
    return [Mount(source=fixed, target=fixed, read_only=False, propagation="rprivate")]


def _apptainer(plan: JobPlan, container: Container, mounts: list[Mount]) -> list[str]:
    """Return the command of apptainer-exec(1). /dev/shm and the PID namespace are the host's by default."""
    binds = [*mounts, *map(_device_mount, container.devices)]
    return [
        "apptainer",
        "exec",
        "--cleanenv",  # the variables come from ENVIRONMENT_FILE
        *(["--nv"] if plan.slot_type == "gpu" else []),
        f"--pwd={plan.code}",
        *[f"--bind={mount.source}:{mount.target}{':ro' if mount.read_only else ''}" for mount in binds],
        *container.args,
        _addressed(container.image),
    ]


def _podman(plan: JobPlan, container: Container, mounts: list[Mount]) -> list[str]:
    """Return the command of podman-run(1), without root: the user keeps their id, and gangs use the host's network.

    It uses the host's PID namespace, so that no rank is PID 1, which ignores signals without a handler
    (pid_namespaces(7)).
    """
    memory = "--ipc=host" if container.shm_size is None else f"--shm-size={container.shm_size}b"
    gpus = ["--device=nvidia.com/gpu=all"] if plan.slot_type == "gpu" else []  # by CDI; the job's cgroup limits them
    return [
        "podman",
        "run",
        "--rm",
        "--network=host",
        "--pid=host",
        "--uts=host",
        "--userns=keep-id",
        "--security-opt=label=disable",  # with SELinux labels, a container cannot read folders of the host
        memory,
        *gpus,
        f"--workdir={plan.code}",
        *[f"--volume={_with(mount, ',')}" for mount in mounts],
        *[f"--device={device.source}:{device.target}:{device.mode}" for device in container.devices],
        "--entrypoint=",  # the image's own one would get our command for its arguments
        *container.args,
        container.image,
    ]


_COMMANDS = {"apptainer": _apptainer, "podman": _podman}


def _with(mount: Mount, separator: str) -> str:
    options = separator.join((["ro"] if mount.read_only else []) + [mount.propagation])
    return f"{mount.source}:{mount.target}:{options}"


def _device_mount(device: Device) -> Mount:
    """Return the device as a mount, for runtimes without an option for devices."""
    return Mount(source=device.source, target=device.target, read_only="w" not in device.mode, propagation="rprivate")


def _addressed(image: str) -> str:
    """Return the image with an address, since apptainer takes a name without one for a file."""
    return image if "://" in image or image.startswith("/") else f"docker://{image}"


def _enroot_image(image: str) -> str:
    """Return an image name as Enroot writes it, with `#` after the registry.

    By Docker's rule, a first part with a dot or a colon is a registry.
    """
    name = image.removeprefix("docker://")
    registry, slash, rest = name.partition("/")
    is_registry = bool(slash) and bool(registry) and ("." in registry or ":" in registry) and "#" not in name
    return f"{registry}#{rest}" if is_registry else name
