"""Which container an experiment's ranks run in on a cluster, and what of it the cluster cannot give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_det.plan.job_plan import Container, Device, Mount

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.job_sections import BindMount
    from hpc_det.config.schema import Experiment

_NO_SHM_SIZE = ("apptainer", "pyxis")


def container(experiment: Experiment, cluster: Cluster, code: str) -> Container | None:
    """None without an image for slots of this type. Relative paths in it are below `code`, where the ranks start."""
    image, runtime = experiment.environment.image_for(cluster.slot_type), cluster.containers.runtime
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
    """The folder for the checkpoints of all experiments, as nodes see it; None: each trial has them in its own."""
    storage = experiment.checkpoint_storage
    if storage.type == "shared_fs":
        # An absolute storage_path stands for itself: joining leaves out host_path, below which it was checked to lie.
        return Path(storage.host_path) / (storage.storage_path or "")
    if storage.type == "directory":
        folder = Path(storage.container_path)
        mount = _brings(folder, experiment) if experiment.environment.image_for(cluster.slot_type) else None
        return Path(mount.host_path) / folder.relative_to(mount.container_path) if mount else folder
    return None


def _brings(folder: Path, experiment: Experiment) -> BindMount | None:
    """The mount that a container sees `folder` in."""
    found = [mount for mount in experiment.bind_mounts if folder.is_relative_to(mount.container_path)]
    return max(found, key=lambda mount: len(Path(mount.container_path).parts), default=None)


def _storage(experiment: Experiment, cluster: Cluster) -> Iterator[Mount]:
    """Checkpoints go where they would go without a container: the trial's folder has a link to them."""
    storage, folder = experiment.checkpoint_storage, checkpoint_folder(experiment, cluster)
    if storage.type == "shared_fs":
        yield Mount(
            source=storage.host_path, target=storage.host_path, read_only=False, propagation=storage.propagation
        )
    elif storage.type == "directory" and str(folder) != storage.container_path:
        yield Mount(source=str(folder), target=str(folder), read_only=False, propagation="rprivate")


def container_notes(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """What a user should know, and what is no error."""
    image, runtime = experiment.environment.image_for(cluster.slot_type), cluster.containers.runtime
    if image is None and experiment.environment.image is not None:
        yield f"environment.image: none is named for slots of type {cluster.slot_type}; ranks run without a container"
    if experiment.resources.shm_size is not None and (image is None or runtime in _NO_SHM_SIZE):
        why = "without a container" if image is None else f"with {runtime}"
        yield f"resources.shm_size: has no effect {why}: /dev/shm is the node's"


def container_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Nothing that a runtime would misread or leave out gets as far as a node."""
    image = experiment.environment.image_for(cluster.slot_type)
    if image is None:
        yield from _mounts_without_container(experiment)
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
                f"checkpoint_storage.container_path: {storage.container_path!r} lies in no folder that bind_mounts "
                "brings to be written, so checkpoints would go with the container; mount one there, or use shared_fs"
            )


def _runtime_problems(image: str, cluster: Cluster) -> Iterator[str]:
    runtime, scratch = cluster.containers.runtime, cluster.scratch
    if runtime is None:
        yield (
            f"environment.image: {image!r} needs a container runtime, and cluster {cluster.name!r} names none; set "
            "containers.runtime in its profile, or leave it out: --config environment.image="
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
    """The problem with a path that no container runtime can be told of."""
    if found := {":", ","} & set(path):
        yield f"{where}: {path!r} holds {min(found)!r}, which separates paths on a runtime's command line; rename it"


def _mounts_without_container(experiment: Experiment) -> Iterator[str]:
    """Without a container the host's path is the path: to ask for another one is to ask for what nobody can give."""
    for i, mount in enumerate(experiment.bind_mounts):
        if mount.host_path != mount.container_path:
            yield (
                f"bind_mounts[{i}]: {mount.host_path!r} is seen as {mount.container_path!r} in a container only; set "
                "environment.image, or use the host's path"
            )
