"""One short training, what it does otherwise than the experiment, and what came of it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from hpc_det.config.merge import Tree
from hpc_det.config.rank_variables import NO_WHOLE_BATCH, THROUGHPUT, TrainsOn
from hpc_det.plan.short_training import short_training
from hpc_det.view.formatting import count, number

REPORTS = 10
"""Of a training."""
LABEL = "throughput"
_OUT_OF_MEMORY = re.compile("OutOfMemoryError|CUDA out of memory")


class Aim(str, Enum):
    """What a measurement is about."""

    BASELINE = "baseline"
    INPUT = "input"
    COMMUNICATION = "communication"
    SLOTS = "slots"
    BATCH_SIZE = "batch size"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    aim: Aim
    slots: int
    batch_size: int | None
    """Over all slots; None where only the trial knows it."""
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
                return f"gradients exchanged every {self.aggregation_frequency} batches"
            case Aim.SLOTS:
                return f"on {count(self.slots, 'slot')}"
            case Aim.BATCH_SIZE:
                return f"batches of {self.batch_size}"

    def config(self, experiment: Tree, batches: int) -> Tree:
        """The configuration of the short training, of the `experiment`'s effective one. Nobody is told of it."""
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
class Measured:
    measurement: Measurement
    samples_per_s: float | None
    """Of all slots together; None where the training has failed."""
    spread: float = 0.0
    """Of half the training's own reports: from their lower to their upper quartile, as a share of the median."""
    failure: str | None = None
    """In the trial's own last words."""
    experiment: int | None = None
    """Its id; None where there was none."""

    @classmethod
    def of_reports(cls, measurement: Measurement, samples_per_s: Sequence[float], experiment: int | None) -> Measured:
        """The first report has what is slow only once, and does not count. So there must be two or more."""
        rates = samples_per_s[1:]
        median = statistics.median(rates)
        low, high = _quartiles(rates)
        return cls(measurement=measurement, samples_per_s=median, spread=(high - low) / median, experiment=experiment)

    @property
    def is_out_of_memory(self) -> bool:
        return bool(self.failure and _OUT_OF_MEMORY.search(self.failure))

    @property
    def is_out_of_data(self) -> bool:
        """A batch is larger than the data set."""
        return bool(self.failure and NO_WHOLE_BATCH in self.failure)

    @property
    def summary(self) -> str:
        if self.samples_per_s is not None:
            return f"{number(self.samples_per_s)} samples/s"
        return "out of memory" if self.is_out_of_memory else self.failure or ""

    @property
    def is_a_result(self) -> bool:
        """Also where it is that no such training is possible."""
        return self.failure is None or self.is_out_of_memory or self.is_out_of_data


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _median, high = statistics.quantiles(values, method="inclusive")
    return low, high
