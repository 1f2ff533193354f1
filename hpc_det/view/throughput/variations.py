"""Which short trainings show what limits an experiment: Determined's own tests ("Debug Performance Bottlenecks")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

from hpc_det.config.merge import Tree
from hpc_det.plan.planner import rank_layout
from hpc_det.search.sample import constant
from hpc_det.view.throughput.measurement import Aim, Measured, Measurement

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster

RARELY = 1000
"""Batches between two exchanges of gradients, so that they cost nothing: the number of Determined's guide."""
MOST_DOUBLINGS = 10
WORTH = 1.05
"""A larger batch is worth another one where it is so many times as fast."""


@dataclass(frozen=True, kw_only=True)
class Variations:
    baseline: Measurement
    others: tuple[Measurement, ...]
    """All but the ever larger batches, of which each depends on what came of the one before."""
    grows_batches: bool
    left_out: tuple[str, ...]
    """What cannot be measured, and why."""


def variations(experiment: Tree, cluster: Cluster, most_slots: int | None = None) -> Variations:
    """Of an effective configuration, on a cluster as its pool has it. `most_slots`: by default the experiment's.

    Raises UsageError for slots that no trial can have.
    """
    resources = experiment["resources"]
    baseline = Measurement(
        aim=Aim.BASELINE,
        slots=resources["slots_per_trial"],
        batch_size=_batch_size(experiment["hyperparameters"].get("global_batch_size")),
        aggregation_frequency=experiment["optimizations"]["aggregation_frequency"],
    )
    most = most_slots or baseline.slots
    rank_layout(most, cluster, "--max-slots")
    others, left_out = [replace(baseline, aim=Aim.INPUT, trains_on="first batch")], list[str]()
    if baseline.slots > 1:
        others.append(replace(baseline, aim=Aim.COMMUNICATION, aggregation_frequency=RARELY))
    else:
        left_out.append("communication: one slot exchanges nothing; set resources.slots_per_trial to 2 or more")
    scaled = [_on(baseline, slots) for slots in slot_counts(most, cluster.slots_per_node) if slots != baseline.slots]
    if not scaled:
        left_out.append("scaling: the experiment has one slot; give more with --max-slots")
    if baseline.batch_size is None:
        left_out.append("batch sizes: hyperparameters.global_batch_size is not set; set it, and use it in the trial")
    return Variations(
        baseline=baseline,
        others=(*others, *scaled),
        grows_batches=baseline.batch_size is not None,
        left_out=tuple(left_out),
    )


def slot_counts(most: int, per_node: int) -> list[int]:
    """1, 2, 4, ... within a node, then 1, 2, 4, ... whole nodes, and `most` itself."""
    doubled = [2**power for power in takewhile(lambda power: 2**power <= most, count())]
    within = [slots for slots in doubled if slots <= per_node]
    over = [nodes * per_node for nodes in doubled if nodes * per_node <= most]
    return sorted({*within, *over, most})


def larger_batch(found: Sequence[Measured], *, is_memory_bound: bool) -> Measurement | None:
    """What to measure after the batches so far, the configured one first; None: nothing more comes of it.

    `is_memory_bound`: slots have memory of their own, and the largest batch that fits is of interest by itself.
    """
    last, fails = found[-1], found[-1].samples_per_s is None
    if fails or last.measurement.batch_size is None or len(found) > MOST_DOUBLINGS:
        return None
    if not is_memory_bound and len(found) > 1 and _ratio(last, found[-2]) < WORTH:
        return None
    return replace(last.measurement, aim=Aim.BATCH_SIZE, batch_size=2 * last.measurement.batch_size)


def _ratio(one: Measured, other: Measured) -> float:
    return (one.samples_per_s or 0) / (other.samples_per_s or 1)


def _on(baseline: Measurement, slots: int) -> Measurement:
    """Weak scaling: the batch of a slot stays what it is."""
    size = baseline.batch_size
    each = size // baseline.slots if size else None
    return replace(baseline, aim=Aim.SLOTS, slots=slots, batch_size=each and each * slots)


def _batch_size(spec: Any) -> int | None:
    return None if spec is None else int(constant(spec))
