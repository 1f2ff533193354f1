"""How long a trial trains, and what is due on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from hpc_det.checkpoint.prune import Policy
from hpc_det.pytorch.loop.progress import Progress
from hpc_det.pytorch.trial.units import Batch, TrainUnit, period_from_config, unit_from_config, unit_of

CheckpointPolicy = Literal["best", "all", "none"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything is derived from the progress, so that a resumed run does what an undisturbed one would have done."""

    max_length: TrainUnit
    reporting_period: TrainUnit = field(default_factory=lambda: Batch(100))
    validation_period: TrainUnit | None = None
    """None: at the end only."""
    checkpoint_period: TrainUnit | None = None
    checkpoint_policy: CheckpointPolicy = "best"
    """Beside the period: after each validation, or each that is the best so far."""
    search_unit: str | None = None
    """What the search counts in, batches, records or epochs: the unit of `searcher.max_length`."""
    global_batch_size: int | None = None
    """For lengths in records."""
    initial_validation: bool = False
    metric: str | None = None
    """The validation metric that decides what is best."""
    smaller_is_better: bool = True
    kept: Policy = field(default_factory=Policy)
    """How many checkpoints stay at the end, where no experiment says it."""
    validation_batches: int | None = None
    """None: all of them."""
    only_trains: bool = False
    """Nothing is validated, and nothing saved."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], global_batch_size: int | None) -> Schedule:
        """Of an experiment's effective config."""
        searcher = config["searcher"]
        return cls(
            max_length=unit_from_config(searcher["max_length"], global_batch_size),
            search_unit=unit_of(searcher["max_length"]),
            global_batch_size=global_batch_size,
            reporting_period=Batch(config["scheduling_unit"]),
            validation_period=period_from_config(config["min_validation_period"], global_batch_size),
            checkpoint_period=period_from_config(config["min_checkpoint_period"], global_batch_size),
            checkpoint_policy=cast(CheckpointPolicy, config["checkpoint_policy"]),
            initial_validation=config["perform_initial_validation"],
            metric=searcher["metric"],
            smaller_is_better=searcher["smaller_is_better"],
            kept=Policy.of(config["checkpoint_storage"]),
        )

    def for_test(self) -> Schedule:
        """One batch of everything."""
        return replace(
            self,
            max_length=Batch(1),
            search_unit=None,
            reporting_period=Batch(1),
            validation_period=None,
            checkpoint_period=None,
            initial_validation=False,
            validation_batches=1,
        )

    def for_throughput(self, config: Mapping[str, Any]) -> Schedule:
        """Only training."""
        return replace(self.as_configured(config), only_trains=True)

    def as_configured(self, config: Mapping[str, Any]) -> Schedule:
        """As long as an experiment's effective `config` says, also where a script says otherwise."""
        return replace(
            self,
            max_length=unit_from_config(config["searcher"]["max_length"], self.global_batch_size),
            search_unit=None,
            reporting_period=Batch(config["scheduling_unit"]),
            validation_period=period_from_config(config["min_validation_period"], self.global_batch_size),
        )

    def until(self, length: int) -> Schedule:
        """The same up to the length that the search wants; where the script says a length of its own, that stands."""
        if self.search_unit is None:
            return self
        return replace(self, max_length=unit_from_config({self.search_unit: length}, self.global_batch_size))

    def next_boundary(self, steps: int) -> float:
        """The next number of batches at which something may be due; the end of an epoch is one, too."""
        units = (self.max_length, self.reporting_period, self.validation_period, self.checkpoint_period)
        return min(unit.next_boundary(steps) for unit in units if unit)

    def finished(self, progress: Progress) -> bool:
        return progress.stop_requested or self.max_length.reached(progress)

    def report_is_due(self, progress: Progress) -> bool:
        return self.reporting_period.due(progress) or self.finished(progress)

    def validation_is_due(self, progress: Progress) -> bool:
        if self.only_trains or progress.validated == progress.steps:
            return False
        if progress.steps == 0:
            return self.initial_validation
        return (self.validation_period is not None and self.validation_period.due(progress)) or self.finished(progress)

    def checkpoint_is_due(self, progress: Progress) -> bool:
        """By the period."""
        return progress.steps > 0 and self.checkpoint_period is not None and self.checkpoint_period.due(progress)

    def validated_is_kept(self, progress: Progress, *, improved: bool) -> bool:
        """Whether a checkpoint of just this batch is wanted. `improved`: the last validation was the best so far."""
        wanted = self.checkpoint_policy == "all" or (self.checkpoint_policy == "best" and improved)
        return wanted and progress.steps > 0 and progress.validated == progress.steps
