"""The pool of a cluster that an experiment uses, and the requests that the pool cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError, count, nearest, or_else
from hpc_det.plan.checkpoint_interval import grace_is_too_short
from hpc_det.plan.container import container_notes, container_problems
from hpc_det.plan.planner import rank_layout
from hpc_det.plan.priority import priority_notes
from hpc_det.plan.resource_limits import resource_notes, resource_problems

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import Experiment
    from hpc_det.store.save_times import SaveTimes


def in_its_pool(experiment: Experiment, cluster: Cluster) -> Cluster:
    """Return the profile with the keys of the experiment's pool, overridden by what the experiment sets about its
    nodes.
    """
    in_pool = cluster.in_pool(experiment.resources.resource_pool)
    section = {"slurm": experiment.slurm, "pbs": experiment.pbs}.get(cluster.scheduler)
    own = section.model_dump(include={"slots_per_node", "gpu_type"}, exclude_none=True) if section else {}
    requested = experiment.resources.model_dump(include={"cpus_per_slot", "account", "qos"}, exclude_none=True)
    return in_pool.model_copy(update={**own, **requested})


def pool_problems(experiment: Experiment, cluster: Cluster) -> list[str]:
    """Return each request of the experiment that this cluster cannot serve."""
    there = in_its_pool(experiment, cluster)
    return [
        *_name_problems(experiment, cluster),
        *_time_problems(experiment, there),
        *_gang_problems(experiment, there),
        *container_problems(experiment, there),
        *resource_problems(experiment, there),
    ]


def pool_notes(experiment: Experiment, cluster: Cluster) -> list[str]:
    """Return notes for the user before the submission; none of them is an error."""
    there = in_its_pool(experiment, cluster)
    return [
        *cluster_notes(cluster, experiment.resources.resource_pool),
        *container_notes(experiment, there),
        *priority_notes(experiment, cluster),
        *resource_notes(experiment, there),
    ]


def cluster_notes(cluster: Cluster, pool: str | None) -> list[str]:
    """Return notes about the pool; None is the default pool."""
    if cluster.in_pool(pool).preemption_grace_s != 0:
        return []
    return [
        f"{_pool_of(cluster, pool)} preempts without a grace time: a job may end before it has saved, and resumes "
        "from a checkpoint of min_checkpoint_period or checkpoint_interval: auto, which is always active there"
    ]


def save_notes(experiment: Experiment, cluster: Cluster, former: int, times: SaveTimes | None) -> list[str]:
    """Return notes that follow from the saves of experiment `former`, whose longest are in `times`.

    `cluster` is the profile in the experiment's pool.
    """
    grace_s = cluster.preemption_grace_s
    if not times or not grace_is_too_short(grace_s, times) or experiment.checkpoint_interval == "auto":
        return []
    return [
        f"preempted jobs of {_pool_of(cluster, experiment.resources.resource_pool)} have {grace_s} s, and a save of "
        f"experiment {former} took {times.longest_s:.3g} s: set checkpoint_interval: auto, or a min_checkpoint_period"
    ]


def _pool_of(cluster: Cluster, pool: str | None) -> str:
    return f"pool {pool!r} of cluster {cluster.name!r}" if pool else f"cluster {cluster.name!r}"


def _name_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    pool = experiment.resources.resource_pool
    if pool is not None and cluster.pools and pool not in cluster.pools:
        known = or_else(nearest(pool, cluster.pools), f"known: {', '.join(sorted(cluster.pools))}")
        yield f"resources.resource_pool: cluster {cluster.name!r} has no pool {pool!r}; {known}"


def _gang_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    resources = experiment.resources
    try:
        shape = rank_layout(resources.slots_per_trial, cluster)
        if resources.packed_slots and resources.packed_slots % resources.slots_per_trial == 0:
            rank_layout(resources.packed_slots, cluster, "resources.packed_slots")
    except UsageError as error:
        yield from error.problems
        return
    if resources.is_single_node and shape.nodes > 1:
        yield (
            f"resources.is_single_node: {count(resources.slots_per_trial, 'slot')} need {count(shape.nodes, 'node')} "
            f"of {count(cluster.slots_per_node, 'slot')} on cluster {cluster.name!r}; use at most "
            f"{count(cluster.slots_per_node, 'slot')}"
        )
    if (resources.packed_slots or 0) > cluster.slots_per_node and cluster.slots_per_node % shape.ranks_per_node:
        yield (
            f"resources.packed_slots: trials of {count(resources.slots_per_trial, 'slot')} leave slots idle on nodes "
            f"of {cluster.slots_per_node}; use a slots_per_trial that divides {cluster.slots_per_node}, or "
            f"packed_slots of at most {cluster.slots_per_node}"
        )


def _time_problems(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    resources, most = experiment.resources, cluster.max_time_limit_min
    if resources.time_limit_min is not None and most is not None and resources.time_limit_min > most:
        yield (
            f"resources.time_limit: {resources.time_limit!r} is {resources.time_limit_min} min, and "
            f"{_pool_of(cluster, resources.resource_pool)} has at most {cluster.max_time_limit!r}, {most} min; ask for "
            "less, or choose another pool"
        )
