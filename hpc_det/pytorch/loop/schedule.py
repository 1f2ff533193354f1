"""The progress of a trial, units of training, and the schedule: its length and the periods of what is done in it."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, cast

from hpc_det.checkpoint.retention import Policy
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import Position


@dataclass
class Progress:
    """The progress of a trial, the same on every rank; everything due at a batch is derived from it."""

    steps: int = 0
    """Number of batches trained."""
    position: Position = field(default_factory=Position)
    """Position in the data; `position.epoch` is also the number of epochs completed."""
    epoch_started: bool = False
    """True if the last batch was the first of its epoch."""
    epoch_ended: bool = False
    """True if the last batch completed an epoch, even if it also contains the first records of the next one."""
    validated: int = -1
    """Number of batches at the last validation; -1 before the first."""
    best: float | None = None
    """Best value of the searcher's metric."""
    stop_requested: bool = False
    """True if the trial asked to stop, agreed by all ranks."""

    @property
    def starts_epoch(self) -> bool:
        """True if the next batch is the first of its epoch."""
        return self.epoch_ended or self.steps == 0

    @property
    def last_epoch(self) -> int:
        """Epoch of the last batch, from 0."""
        return self.position.epoch - self.epoch_ended

    def advance(self, position: Position, batches: int) -> None:
        """Count `batches` more of one epoch, which end at `position`."""
        self.epoch_started = self.starts_epoch and batches == 1
        self.steps += batches
        self.epoch_ended = position.epoch > self.position.epoch
        self.position = position


@dataclass(frozen=True)
class TrainUnit:
    """An amount of training: a length, a period or a schedule.

    `value` is a whole number for a length or a period, or a container of numbers for a schedule. A period below 1 is
    due after every batch. Use `Batch` or `Epoch`.
    """

    value: int | Container[int]

    def __post_init__(self) -> None:
        """Raise UsageError for any other value."""
        is_schedule = isinstance(self.value, Container) and not isinstance(self.value, (str, bytes))
        if isinstance(self.value, bool) or not (isinstance(self.value, int) or is_schedule):
            kind = type(self).__name__
            raise UsageError(f"{kind}({self.value!r}): expected a whole number, such as {kind}(100), or a list of them")

    def due(self, progress: Progress) -> bool:
        """Return whether the last batch completed a period or reached a number of the schedule."""
        raise NotImplementedError

    def reached(self, progress: Progress) -> bool:
        """Return whether training of this length is complete."""
        return self._done(progress) >= self.length

    @property
    def length(self) -> int:
        """The length. Raises TypeError for a schedule, UsageError for less than 1."""
        if not isinstance(self.value, int):
            raise TypeError(
                f"max_length: {self} is a schedule; give a whole number, such as {type(self).__name__}(100)"
            )
        if self.value < 1:
            raise UsageError(f"max_length: {self} trains nothing; give at least {type(self).__name__}(1)")
        return self.value

    def next_boundary(self, steps: int) -> float:
        """Return the next number of batches after `steps` at which this may be due.

        Infinity if it can only be due at the end of an epoch, which is a boundary anyway.
        """
        return math.inf

    def batches(self, batches_per_epoch: int | Fraction | None) -> int:
        """Return this length in batches. Raises UsageError for epochs of a loader of unknown length."""
        raise NotImplementedError

    def _done(self, progress: Progress) -> int:
        raise NotImplementedError

    def _matches(self, count: int) -> bool:
        if isinstance(self.value, int):
            return self.value < 1 or count % self.value == 0
        return count in self.value


class Batch(TrainUnit):
    """An amount of training in batches: `Batch(100)` is a length of 100 batches, or a period of every 100 batches."""

    def due(self, progress: Progress) -> bool:
        return progress.steps > 0 and self._matches(progress.steps)

    def next_boundary(self, steps: int) -> float:
        period = self.value if isinstance(self.value, int) and self.value > 0 else 1
        return (steps // period + 1) * period

    def batches(self, batches_per_epoch: int | Fraction | None) -> int:
        return self.length

    def _done(self, progress: Progress) -> int:
        return progress.steps


class Epoch(TrainUnit):
    """An amount of training in epochs: `Epoch(2)` is a length of 2 epochs, or a period of every 2 epochs."""

    def due(self, progress: Progress) -> bool:
        return progress.epoch_ended and self._matches(progress.position.epoch)

    def batches(self, batches_per_epoch: int | Fraction | None) -> int:
        if batches_per_epoch is None:
            raise UsageError(
                f"{self}: the training loader has no length, so the end of an epoch is unknown; "
                f"give the length in batches, or define __len__ of the loader"
            )
        return math.ceil(self.length * batches_per_epoch)

    def _done(self, progress: Progress) -> int:
        return progress.position.epoch


def unit_from_config(config: Mapping[str, int] | int, global_batch_size: int | None) -> TrainUnit:
    """Return the unit of `{batches: 5}`, `{epochs: 5}`, `{records: 500}` or 5, which counts batches.

    Records become batches by Determined's rule: max(records // global_batch_size, 1).
    """
    ((unit, amount),) = config.items() if isinstance(config, Mapping) else (("batches", config),)
    if unit == "epochs":
        return Epoch(amount)
    if unit == "batches":
        return Batch(amount)
    if not global_batch_size:
        raise UsageError(f"{{records: {amount}}}: set hyperparameters.global_batch_size, or count batches or epochs")
    return Batch(max(amount // global_batch_size, 1))


def unit_of(config: Mapping[str, int] | int) -> str:
    """Return the unit of a length in a configuration: batches, records or epochs."""
    return next(iter(config)) if isinstance(config, Mapping) else "batches"


def period_from_config(config: Mapping[str, int] | int, global_batch_size: int | None) -> TrainUnit | None:
    """Return the period; None for zero, which in a configuration means only at the end."""
    amount = next(iter(config.values())) if isinstance(config, Mapping) else config
    return unit_from_config(config, global_batch_size) if amount else None


CheckpointPolicy = Literal["best", "all", "none"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The length of a training and its periods. What is due depends on the progress alone, so a resumed run does the
    same.
    """

    max_length: TrainUnit
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
        """Return whether the checkpoint period is complete."""
        return progress.steps > 0 and self.checkpoint_period is not None and self.checkpoint_period.due(progress)

    def validated_is_kept(self, progress: Progress, *, improved: bool) -> bool:
        """Return whether the policy keeps a checkpoint of this batch. `improved`: the last validation was
        the best one.
        """
        wanted = self.checkpoint_policy == "all" or (self.checkpoint_policy == "best" and improved)
        return wanted and progress.steps > 0 and progress.validated == progress.steps
