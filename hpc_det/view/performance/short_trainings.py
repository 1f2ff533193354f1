"""The short trainings that show the limits of an experiment, and their results.

They are the tests that Determined's guide "Debug Performance Bottlenecks" recommends.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from hpc_det.config.merge import Tree
from hpc_det.config.rank_variables import NO_WHOLE_BATCH, THROUGHPUT, TrainsOn
from hpc_det.errors import count
from hpc_det.plan.planner import rank_layout
from hpc_det.plan.short_training import short_training
from hpc_det.search.sample import constant
from hpc_det.view.formatting import number
from hpc_det.view.performance.measured import Conditions

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster


REPORTS = 10
"""Number of training reports in each short training."""
LABEL = "throughput"
RARELY = 1000
"""Batches between two exchanges of gradients, so that their cost is negligible; from Determined's guide."""
MOST_DOUBLINGS = 10
"""Largest number of measurements with growing batches."""
WORTH = 1.05
"""Ratio to the previous throughput from which on a larger batch is tried, if slots are CPUs that share memory."""
_OUT_OF_MEMORY = re.compile("OutOfMemoryError|CUDA out of memory")


class Aim(str, Enum):
    """The question that a measurement answers."""

    BASELINE = "baseline"
    INPUT = "input"
    COMMUNICATION = "communication"
    SLOTS = "slots"
    BATCH_SIZE = "batch size"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One short training: the settings in which it may differ from the experiment."""

    aim: Aim
    slots: int
    batch_size: int | None
    """Records per batch over all slots; None if `global_batch_size` is not a hyperparameter."""
    aggregation_frequency: int
    trains_on: TrainsOn = "data"

    @property
    def title(self) -> str:
        match self.aim:
            case Aim.BASELINE:
                return "as configured"
            case Aim.INPUT:
                return "the first batch over and over"
            case Aim.COMMUNICATION:
                return f"gradients exchanged every {count(self.aggregation_frequency, 'batch')}"
            case Aim.SLOTS:
                return f"on {count(self.slots, 'slot')}"
            case Aim.BATCH_SIZE:
                return f"batches of {self.batch_size}"

    def config(self, experiment: Tree, batches: int) -> Tree:
        """Return the configuration of this training of `batches` batches, made from the experiment's effective one.

        It has no notification hooks.
        """
        tree = short_training(
            experiment,
            title=self.title,
            label=LABEL,
            batches=batches,
            reports=REPORTS,
            variable=f"{THROUGHPUT}={self.trains_on}",
        )
        tree["resources"] |= {"slots_per_trial": self.slots, "max_slots": None, "packed_slots": None}
        tree["optimizations"]["aggregation_frequency"] = self.aggregation_frequency
        if self.batch_size is not None:
            tree["hyperparameters"]["global_batch_size"] = self.batch_size
        return tree


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The result of a measurement."""

    measurement: Measurement
    samples_per_s: float | None
    """Samples per second of all slots together; None if the training failed."""
    spread: float = 0.0
    """Interquartile range of the training's reports, as a share of the median."""
    failure: str | None = None
    """The trial's error message."""
    experiment: int | None = None
    """Number of the training's experiment; None if it could not be submitted."""

    @classmethod
    def of_reports(cls, measurement: Measurement, samples_per_s: Sequence[float], experiment: int | None) -> Throughput:
        """Return the result of at least two reports. The first one includes start-up work and is ignored."""
        rates = samples_per_s[1:]
        median = statistics.median(rates)
        low, high = _quartiles(rates)
        return cls(measurement=measurement, samples_per_s=median, spread=(high - low) / median, experiment=experiment)

    @property
    def is_out_of_memory(self) -> bool:
        return bool(self.failure and _OUT_OF_MEMORY.search(self.failure))

    @property
    def is_out_of_data(self) -> bool:
        """True if a batch is larger than the data set."""
        return bool(self.failure and NO_WHOLE_BATCH in self.failure)

    @property
    def summary(self) -> str:
        if self.samples_per_s is not None:
            return f"{number(self.samples_per_s)} samples/s"
        return "out of memory" if self.is_out_of_memory else self.failure or ""

    @property
    def is_a_result(self) -> bool:
        """True if the measurement succeeded, or showed that a batch is too large for the memory or the data set."""
        return self.failure is None or self.is_out_of_memory or self.is_out_of_data


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of at least one value."""
    if len(values) < 2:
        return values[0], values[0]
    low, _median, high = statistics.quantiles(values, method="inclusive")
    return low, high


# --- which trainings there are


@dataclass(frozen=True, kw_only=True)
class Variations:
    """The measurements of an experiment."""

    conditions: Conditions
    """Conditions of the experiment as configured."""
    baseline: Measurement
    others: tuple[Measurement, ...]
    """All measurements except those with growing batches, each of which depends on the results before it."""
    grows_batches: bool
    """True if measurements with growing batches follow; see `larger_batch`."""
    left_out: tuple[str, ...]
    """Measurements that are not possible, with the reason."""


def variations(experiment: Tree, cluster: Cluster, most_slots: int | None = None) -> Variations:
    """Return the measurements for an effective configuration, on the cluster as its resource pool has it.

    `most_slots`: largest number of slots; None: the experiment's own. Raises UsageError if no trial can have them.
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
        conditions=_conditions(experiment, cluster, baseline),
        baseline=baseline,
        others=(*others, *scaled),
        grows_batches=baseline.batch_size is not None,
        left_out=tuple(left_out),
    )


def _conditions(experiment: Tree, cluster: Cluster, baseline: Measurement) -> Conditions:
    return Conditions(
        config=experiment,
        hparams={"global_batch_size": baseline.batch_size},
        slots=baseline.slots,
        nodes=rank_layout(baseline.slots, cluster).nodes,
        scheduler=cluster.scheduler,
        cpus_per_rank=cluster.cpus_per_slot,
        shares_nodes=False,
    )


def slot_counts(most: int, per_node: int) -> list[int]:
    """Return 1, 2, 4, ... slots within a node, then 1, 2, 4, ... whole nodes, and `most`."""
    doubled = [2**power for power in range(most.bit_length())]
    within = [slots for slots in doubled if slots <= per_node]
    over = [nodes * per_node for nodes in doubled if nodes * per_node <= most]
    return sorted({*within, *over, most})


def larger_batch(found: Sequence[Throughput], *, is_memory_bound: bool) -> Measurement | None:
    """Return the measurement with the next larger batch; None if it would not be useful.

    `found`: the results so far, smallest batch first, beginning with the configured one. `is_memory_bound`: slots are
    GPUs, which have separate memories, so the largest batch that fits is of interest even if it is not faster.
    """
    last, fails = found[-1], found[-1].samples_per_s is None
    if fails or last.measurement.batch_size is None or len(found) > MOST_DOUBLINGS:
        return None
    if not is_memory_bound and len(found) > 1 and _ratio(last, found[-2]) < WORTH:
        return None
    return replace(last.measurement, aim=Aim.BATCH_SIZE, batch_size=2 * last.measurement.batch_size)


def _ratio(one: Throughput, other: Throughput) -> float:
    return (one.samples_per_s or 0) / (other.samples_per_s or 1)


def _on(baseline: Measurement, slots: int) -> Measurement:
    """Return the measurement on another number of slots with the same batch per slot (weak scaling)."""
    size = baseline.batch_size
    each = size // baseline.slots if size else None
    return replace(baseline, aim=Aim.SLOTS, slots=slots, batch_size=each and each * slots)


def _batch_size(spec: Any) -> int | None:
    return None if spec is None else int(constant(spec))
