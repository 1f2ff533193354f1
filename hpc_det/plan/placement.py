"""Which jobs do the work of an experiment: how many nodes and ranks each has, how many jobs, how many at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_det.errors import UsageError
from hpc_det.plan.job_plan import JobArray

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import Experiment


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Of a gang, or of the allocation of a job."""

    nodes: int
    ranks_per_node: int


def rank_layout(slots: int, cluster: Cluster, path: str = "resources.slots_per_trial") -> RankLayout:
    """Return the nodes for `slots`, and the ranks on each.

    Determined schedules any number of slots within one node and only whole nodes beyond; a request that fits neither
    "waits indefinitely" there (its guide, *Scheduling Behavior*). Here it raises UsageError, which names `path` and
    what would fit, as it does for more nodes than the cluster has.
    """
    per_node = cluster.slots_per_node
    if slots <= per_node:
        return RankLayout(nodes=1, ranks_per_node=slots)
    if cluster.max_nodes is not None and slots > cluster.max_nodes * per_node:
        raise UsageError(
            f"{path}: {slots} is more than cluster '{cluster.name}' has, {cluster.max_nodes} "
            f"node(s) of {per_node} slots; use at most {cluster.max_nodes * per_node}"
        )
    if slots % per_node:
        low = slots - slots % per_node
        raise UsageError(
            f"{path}: {slots} does not fill whole nodes of {per_node} slots on cluster "
            f"'{cluster.name}'; use {low} or {low + per_node}"
        )
    return RankLayout(nodes=slots // per_node, ranks_per_node=per_node)


@dataclass(frozen=True, kw_only=True)
class Placement:
    gang: RankLayout
    job: RankLayout
    """The allocation of one job."""
    arrays: tuple[JobArray, ...]

    @property
    def workers(self) -> int:
        return sum(array.workers for array in self.arrays)


def placement(experiment: Experiment, cluster: Cluster, trials: int, first: int = 0) -> Placement:
    """For `trials` trials, with workers numbered from `first`.

    A job for each trial, in arrays as long as the cluster allows; or one allocation for all, where
    `resources.packed_slots` asks for it, or where there is no queue. Raises UsageError for slots that fit the cluster
    in no way.
    """
    resources = experiment.resources
    shape = rank_layout(resources.slots_per_trial, cluster)
    at_once = _at_once(experiment, trials)
    shared = resources.packed_slots or (
        _slots_here(cluster, resources.slots_per_trial) if not cluster.has_queue else None
    )
    if shared is None:
        return Placement(gang=shape, job=shape, arrays=_arrays(trials, at_once, cluster.max_array_size, first))
    gangs = min(shared // resources.slots_per_trial, at_once)
    job = rank_layout(shared, cluster) if gangs > 1 else shape
    return Placement(gang=shape, job=job, arrays=(JobArray(first=first, count=1, workers_each=gangs),))


def _at_once(experiment: Experiment, trials: int) -> int:
    """How many trials may train at the same time: no limit is as many as there are."""
    searcher, resources = experiment.searcher, experiment.resources
    limits = [trials, getattr(searcher, "max_concurrent_trials", 0) or trials]
    if resources.max_slots is not None:
        limits.append(max(resources.max_slots // resources.slots_per_trial, 1))
    return min(limits)


def _slots_here(cluster: Cluster, slots_per_trial: int) -> int:
    """What one machine has, in whole gangs."""
    return max(cluster.slots_per_node * (cluster.max_nodes or 1) // slots_per_trial, 1) * slots_per_trial


def _arrays(trials: int, at_once: int, longest: int, first: int) -> tuple[JobArray, ...]:
    """Several arrays come one after the other where the number of trials at once is limited."""
    return tuple(
        JobArray(
            first=first + start,
            count=min(longest, trials - start),
            at_once=at_once if at_once < trials else None,
        )
        for start in range(0, trials, longest)
    )
