"""The schedule of a training: its length and the periods of what is done in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, cast

from hpc_det.checkpoint.retention import Policy
from hpc_det.core.progress import Batch, Progress, TrainUnit, period_from_config, unit_from_config, unit_of

CheckpointPolicy = Literal["best", "all", "none"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a training and its periods. What is due depends on the progress alone, so a resumed run does the
    same.
    """

    max_length: TrainUnit
    limit: TrainUnit | None = None
    """Length at which the trial ends although the search may request more; None: none."""
    reporting_period: TrainUnit = field(default_factory=lambda: Batch(100))
    validation_period: TrainUnit | None = None
    """None validates only at the end."""
    checkpoint_period: TrainUnit | None = None
    checkpoint_policy: CheckpointPolicy = "best"
    """Checkpoints besides the periodic ones: after each validation ("all"), after each best one, or none."""
    search_unit: str | None = None
    """Unit in which the search counts: batches, records or epochs, as in `searcher.max_length`."""
    global_batch_size: int | None = None
    """Records of a batch over all ranks, for lengths in records."""
    initial_validation: bool = False
    metric: str | None = None
    """Validation metric that decides which validation is best."""
    smaller_is_better: bool = True
    kept: Policy = field(default_factory=Policy)
    """Numbers of checkpoints to keep, for a run outside a job."""
    validation_batches: int | None = None
    """Batches of a validation; None validates with all of them."""
    only_trains: bool = False
    """True for runs without validations and checkpoints."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], global_batch_size: int | None) -> Schedule:
        """Return the schedule of an experiment's effective configuration."""
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
        """Return a schedule that trains, validates and saves one batch."""
        return replace(
            self,
            max_length=Batch(1),
            limit=None,
            search_unit=None,
            reporting_period=Batch(1),
            validation_period=None,
            checkpoint_period=None,
            initial_validation=False,
            validation_batches=1,
        )

    def for_throughput(self, config: Mapping[str, Any]) -> Schedule:
        """Return a schedule that only trains."""
        return replace(self.as_configured(config), only_trains=True)

    def as_configured(self, config: Mapping[str, Any]) -> Schedule:
        """Return a schedule with the lengths of `config`, the effective configuration, even if a script sets others."""
        return replace(
            self,
            max_length=unit_from_config(config["searcher"]["max_length"], self.global_batch_size),
            limit=None,
            search_unit=None,
            reporting_period=Batch(config["scheduling_unit"]),
            validation_period=period_from_config(config["min_validation_period"], self.global_batch_size),
        )

    def until(self, length: int) -> Schedule:
        """Return the schedule up to the length that the search requests; unchanged if the script sets its
        own length.
        """
        if self.search_unit is None:
            return self
        return replace(self, max_length=unit_from_config({self.search_unit: length}, self.global_batch_size))

    def next_boundary(self, steps: int) -> float:
        """Return the next number of batches at which something may be due. The end of an epoch is a boundary, too."""
        units = (self.max_length, self.limit, self.reporting_period, self.validation_period, self.checkpoint_period)
        return min(unit.next_boundary(steps) for unit in units if unit)

    def batches(self, batches_per_epoch: int | Fraction | None) -> int:
        """Return the longest training in batches. Raises UsageError for epochs of a loader of unknown length."""
        return min(unit.batches(batches_per_epoch) for unit in (self.max_length, self.limit) if unit)

    def finished(self, progress: Progress) -> bool:
        return progress.stop_requested or self.max_length.reached(progress) or self.limit_reached(progress)

    def limit_reached(self, progress: Progress) -> bool:
        return self.limit is not None and self.limit.reached(progress)

    def report_is_due(self, progress: Progress) -> bool:
        """Return whether training metrics are reported: also before each validation and each periodic checkpoint.

        As in Determined (_train in harness/determined/pytorch/_pytorch_trial.py).
        """
        others = self.validation_is_due(progress), self.checkpoint_is_due(progress), self.finished(progress)
        return self.reporting_period.due(progress) or any(others)

    def validation_is_due(self, progress: Progress) -> bool:
        if self.only_trains or progress.validated == progress.steps:
            return False
        if progress.steps == 0:
            return self.initial_validation
        return (self.validation_period is not None and self.validation_period.due(progress)) or self.finished(progress)

    def checkpoint_is_due(self, progress: Progress) -> bool:
        """Return whether the checkpoint period is complete."""
        return progress.steps > 0 and self.checkpoint_period is not None and self.checkpoint_period.due(progress)

    def validated_is_kept(self, progress: Progress, *, improved: bool) -> bool:
        """Return whether the policy keeps a checkpoint of this batch. `improved`: the last validation was
        the best one.
        """
        wanted = self.checkpoint_policy == "all" or (self.checkpoint_policy == "best" and improved)
        return wanted and progress.steps > 0 and progress.validated == progress.steps
