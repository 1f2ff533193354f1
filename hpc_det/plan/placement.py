"""An experiment on a cluster: the profile in the chosen pool, and what of the experiment it cannot give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError
from hpc_det.plan.container import Container, Device, Mount
from hpc_det.plan.gang import gang

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import BindMount, Experiment

_NO_SHM_SIZE = ("apptainer", "pyxis")


def place(experiment: Experiment, cluster: Cluster) -> Cluster:
    """The profile as the experiment's pool has it. Raises UsageError with all that this cluster cannot give."""
    problems = [*_pool_problems(experiment, cluster)]
    placed = cluster.in_pool(experiment.resources.resource_pool)
    problems += [*_time_problems(experiment, placed), *_container_problems(experiment, placed)]
    try:
        gang(experiment.resources.slots_per_trial, placed)
    except UsageError as error:
        problems += error.problems
    if problems:
        raise UsageError(problems)
    return placed


def placement_notes(experiment: Experiment, cluster: Cluster) -> list[str]:
    """What a user should know before the submission, and what is no error."""
    resources, notes = experiment.resources, cluster_notes(cluster, experiment.resources.resource_pool)
    if resources.shm_size is not None:
        if image(experiment, cluster) is None:
            notes.append("resources.shm_size has no effect without a container: /dev/shm is the node's")
        elif cluster.containers.runtime in _NO_SHM_SIZE:
            notes.append(f"resources.shm_size has no effect with {cluster.containers.runtime}: /dev/shm is the node's")
    return notes


def cluster_notes(cluster: Cluster, pool: str | None) -> list[str]:
    """What a user should know of the pool, None for the default one."""
    placed = cluster.in_pool(pool)
    if placed.preempt_mode in ("requeue", "cancel") and placed.grace_time_s == 0:
        where = f"pool {pool!r}" if pool else "the default pool"
        return [
            f"{where} of cluster {cluster.name!r} preempts without a grace time: only the checkpoints of "
            "min_checkpoint_period are sure to be there afterwards"
        ]
    return []


def image(experiment: Experiment, cluster: Cluster) -> str | None:
    """The image for the ranks on slots of the pool's type; None: no container."""
    return experiment.environment.image_for(cluster.in_pool(experiment.resources.resource_pool).slot_type)


def container(experiment: Experiment, placed: Cluster, code: str) -> Container | None:
    """What the ranks run in. A relative path in the container is below the folder of the code, where they start."""
    chosen = experiment.environment.image_for(placed.slot_type)
    if chosen is None or placed.containers.runtime is None:
        return None
    return Container(
        runtime=placed.containers.runtime,
        image=chosen,
        mounts=tuple(
            Mount(
                source=mount.host_path,
                target=_target(mount, code),
                read_only=mount.read_only,
                propagation=mount.propagation,
            )
            for mount in experiment.bind_mounts
        ),
        devices=tuple(
            Device(source=device.host_path, target=device.container_path, mode=device.mode)
            for device in experiment.resources.devices
        ),
        shm_size=experiment.resources.shm_size,
        args=tuple(placed.containers.args),
    )


def _target(mount: BindMount, code: str) -> str:
    return mount.container_path if mount.container_path.startswith("/") else f"{code}/{mount.container_path}"


def _pool_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    if cluster.scheduler == "pbs":
        yield f"cluster: PBS is not supported yet; choose another cluster than {cluster.name!r}"
    pool = experiment.resources.resource_pool
    if pool is not None and cluster.pools and pool not in cluster.pools:
        known = ", ".join(sorted(cluster.pools))
        yield f"resources.resource_pool: cluster {cluster.name!r} has no pool {pool!r}; known: {known}"


def _time_problems(experiment: Experiment, placed: Cluster) -> Iterator[str]:
    wanted, most = experiment.resources.time_limit_min, placed.max_time_limit_min
    if wanted is not None and most is not None and wanted > most:
        pool = experiment.resources.resource_pool
        where = f"pool {pool!r}" if pool else "the default pool" if placed.pools else "a job"
        yield (
            f"resources.time_limit: {experiment.resources.time_limit!r} is {wanted} min, and {where} of cluster "
            f"{placed.name!r} has at most {placed.max_time_limit!r}, {most} min; ask for less, or choose another pool"
        )


def _container_problems(experiment: Experiment, placed: Cluster) -> Iterator[str]:
    chosen, runtime = experiment.environment.image_for(placed.slot_type), placed.containers.runtime
    if chosen is None:
        yield from _mounts_without_container(experiment)
        return
    if runtime is None:
        yield (
            f"environment.image: {chosen!r} needs a container runtime, and cluster {placed.name!r} names none; set "
            "containers.runtime in its profile, or leave out the image"
        )
    if runtime == "pyxis" and placed.scheduler != "slurm":
        yield (
            f"cluster.containers.runtime: pyxis is a plugin of Slurm, and the scheduler of cluster {placed.name!r} is "
            f"{placed.scheduler}; choose apptainer or podman"
        )
    if runtime == "pyxis" and placed.scratch and not placed.scratch.partition("$")[0].strip("/"):
        yield (
            f"cluster.scratch: {placed.scratch!r} names no folder before its first variable, and pyxis needs one to "
            "mount; write it as a path such as /scratch/$SLURM_JOB_ID"
        )
    if "://" not in chosen and chosen.endswith((".sif", ".sqsh")) and not chosen.startswith("/"):
        yield f"environment.image: {chosen!r} is a relative path; give an absolute one, which every node sees"
    for i, mount in enumerate(experiment.bind_mounts):
        if runtime == "apptainer" and mount.propagation not in ("rprivate", "private"):
            yield f"bind_mounts[{i}].propagation: apptainer has no {mount.propagation!r}; leave it at rprivate"
        for path in (mount.host_path, mount.container_path):
            yield from unmountable(f"bind_mounts[{i}]", path)
    for i, device in enumerate(experiment.resources.devices):
        for path in (device.host_path, device.container_path):
            yield from unmountable(f"resources.devices[{i}]", path)


def unmountable(where: str, path: str) -> Iterator[str]:
    """The problem with a path that no container runtime can be told of."""
    if found := {":", ","} & set(path):
        yield f"{where}: {path!r} holds {min(found)!r}, which separates paths on a runtime's command line; rename it"


def _mounts_without_container(experiment: Experiment) -> Iterator[str]:
    """Without a container the host's path is the path: to ask for another one is to ask for what nobody can give."""
    paths = [(f"bind_mounts[{i}]", mount) for i, mount in enumerate(experiment.bind_mounts)]
    for where, mount in paths:
        if mount.host_path != mount.container_path:
            yield (
                f"{where}: {mount.host_path!r} can be seen as {mount.container_path!r} in a container only; set "
                "environment.image, or use the host's path"
            )
