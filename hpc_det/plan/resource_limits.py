"""The resources that an experiment requests for itself, and the limits of the profile for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpc_det.config.fields import size_bytes
from hpc_det.config.managed_flags import given_flags, given_qsub_flags
from hpc_det.errors import count, nearest, or_else
from hpc_det.plan.pbs_chunk import pbs_resources

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.job_sections import Resources
    from hpc_det.config.schema import Experiment

_PBS_VALUE = re.compile(r"[A-Za-z0-9_.-]+")
_PBS_MANAGED = ("ncpus", "ngpus", "gpu_type", "mpiprocs", "ompthreads", "mem", "host", "vnode")
"""Resources of a chunk that hpc_det writes itself."""
_SBATCH = {
    "account": ("account",),
    "qos": ("qos",),
    "constraint": ("constraint",),
    "memory_per_slot": ("mem", "mem-per-cpu", "mem-per-gpu"),
}
"""The flags of sbatch that request the same as a key of `resources`."""


def memory_per_node(resources: Resources, slots: int) -> str | None:
    """Return the memory of that many slots of a node, in the notation of `memory_per_slot`; None if it is not set."""
    if resources.memory_per_slot is None:
        return None
    number, unit = re.fullmatch(r"([0-9]+)([KMGT]?)", resources.memory_per_slot).groups()  # type: ignore[union-attr]
    return f"{int(number) * slots}{unit}"


def resource_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yield each request that exceeds a limit of the profile, that the scheduler cannot have, or that a flag repeats.

    `cluster` is the profile in the experiment's pool.
    """
    yield from _cpu_problems(experiment, cluster)
    yield from _memory_problems(experiment, cluster)
    resources = experiment.resources
    yield from _not_allowed("account", resources.account, cluster.allowed_accounts, cluster)
    yield from _not_allowed("qos", resources.qos, cluster.allowed_qos, cluster)
    yield from _constraint_problems(resources.constraint, cluster)
    yield from qos_problems(resources.qos, cluster)
    yield from _repeated(experiment, cluster)


def resource_notes(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yield a note for each request that has no effect, because no scheduler takes it."""
    if not cluster.has_queue:
        for key in _SBATCH:
            if getattr(experiment.resources, key) is not None:
                yield f"resources.{key}: has no effect: cluster {cluster.name!r} has no scheduler"


def _slots_of_node(experiment: Experiment, cluster: Cluster) -> int:
    """Return the most slots of a node that a job of the experiment has."""
    resources = experiment.resources
    return min(max(resources.slots_per_trial, resources.packed_slots or 0), cluster.slots_per_node)


def _cpu_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    wanted, most = experiment.resources.cpus_per_slot, cluster.max_cpus_per_node
    slots = _slots_of_node(experiment, cluster)
    if wanted and most and wanted * slots > most:
        remedy = f"use at most {most // slots}" if most >= slots else "use fewer slots"
        yield (
            f"resources.cpus_per_slot: {wanted} for each of {count(slots, 'slot')} of a node are "
            f"{count(wanted * slots, 'CPU')}, and cluster {cluster.name!r} has at most {most} (max_cpus_per_node); "
            f"{remedy}"
        )


def _memory_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    slots, most = _slots_of_node(experiment, cluster), cluster.max_memory_per_node
    wanted = memory_per_node(experiment.resources, slots)
    if wanted and most and _megabytes(wanted) > _megabytes(most):
        yield (
            f"resources.memory_per_slot: {experiment.resources.memory_per_slot!r} for each of "
            f"{count(slots, 'slot')} of a node are {wanted}, and cluster {cluster.name!r} has at most {most!r} "
            f"(max_memory_per_node); use at most {_rounded_down(_megabytes(most) / slots)}"
        )


def _megabytes(size: str) -> float:
    """Return a size in Slurm's notation in MiB; a number without a unit is in MiB already (sbatch(1), --mem)."""
    return size_bytes(size if size[-1] in "KMGT" else f"{size}M") / 2**20


def _rounded_down(megabytes: float) -> str:
    """Return a size in GiB, or in MiB below one GiB."""
    return f"{int(megabytes / 1024)}G" if megabytes >= 1024 else f"{int(megabytes)}M"


def _not_allowed(key: str, wanted: str | None, allowed: list[str], cluster: Cluster) -> Iterator[str]:
    if wanted is not None and allowed and wanted not in allowed:
        known = or_else(nearest(wanted, allowed), f"allowed: {', '.join(allowed)}")
        yield f"resources.{key}: {wanted!r} is not one that cluster {cluster.name!r} allows; {known}"


def _constraint_problems(constraint: str | None, cluster: Cluster) -> Iterator[str]:
    if constraint is None:
        return
    # In Slurm `*` precedes a number of nodes (sbatch(1), --constraint).
    names = re.findall(r"[A-Za-z0-9_./:=+-]+", re.sub(r"\*[0-9]+", "", constraint))
    if cluster.scheduler == "pbs":
        try:
            names = [resource.partition("=")[0] for resource in pbs_resources(constraint)]
        except ValueError:
            yield (
                f"resources.constraint: {constraint!r}: PBS selects nodes by the resources of a chunk, and has no "
                f"alternatives, counts or groups; write NAME or NAME=VALUE, joined by &"
            )
            return
        for name in names:
            if name in _PBS_MANAGED:
                yield f"resources.constraint: {constraint!r}: hpc_det sets {name} itself; remove it from the constraint"
    for name in dict.fromkeys(names):
        yield from _not_allowed("constraint", name, cluster.allowed_constraints, cluster)


def qos_problems(wanted: str | None, cluster: Cluster) -> Iterator[str]:
    """Yield why PBS cannot have the quality of service in `cluster`. `wanted`: the experiment's, if it requests one."""
    if cluster.scheduler != "pbs":
        return
    if cluster.qos_resource:
        if cluster.qos and not _PBS_VALUE.fullmatch(cluster.qos):
            where = "resources.qos" if wanted else "cluster.qos"
            yield f"{where}: {cluster.qos!r} cannot be a value of a PBS resource; use letters, digits and _ . -"
    elif wanted is not None:
        yield (
            f"resources.qos: {wanted!r}: PBS has no quality of service; name a queue with resources.resource_pool, or "
            f"let the profile of cluster {cluster.name!r} name the site's resource for it with qos_resource"
        )
    elif cluster.qos:
        yield (
            f"cluster.qos: PBS has no quality of service, and cluster {cluster.name!r} sets {cluster.qos!r}; remove "
            "it, and name a queue with resources.resource_pool, or name the site's resource for it with qos_resource"
        )


def _repeated(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yield a problem for each flag of sbatch or qsub that repeats a key of `resources`."""
    given, where = list[tuple[str, str]](), ""
    known: Mapping[str, tuple[str, ...]] = {}
    if cluster.scheduler == "slurm":
        given, known, where = given_flags(experiment.slurm.sbatch_args), _SBATCH, "slurm.sbatch_args"
    elif cluster.scheduler == "pbs":
        given, where = given_qsub_flags(experiment.pbs.pbsbatch_args), "pbs.pbsbatch_args"
        known = {"account": ("A",), "qos": (f"l {cluster.qos_resource}",)}
    for key, flags in known.items():
        value = getattr(experiment.resources, key)
        for word in (word for flag, word in given if flag in flags and value is not None):
            yield f"{where}: {word!r} and resources.{key} {value!r} set the same; remove one of them"
