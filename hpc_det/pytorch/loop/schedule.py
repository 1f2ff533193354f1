"""The progress of a trial, units of training, and the schedule: how long it trains, and what is due on the way."""

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
    """Where a trial is: everything due at a batch is derived from it. The same on every rank."""

    steps: int = 0
    """Batches trained."""
    position: Position = field(default_factory=Position)
    """`position.epoch` is also the number of epochs completed."""
    epoch_started: bool = False
    """Whether the last batch was the first of its epoch."""
    epoch_ended: bool = False
    """Whether the last batch completed an epoch; it may have begun the next one, too."""
    validated: int = -1
    """Batches at the last validation."""
    best: float | None = None
    """The best value of the searcher metric so far."""
    stop_requested: bool = False
    """By the trial, and known to all ranks."""

    @property
    def starts_epoch(self) -> bool:
        """Whether the next batch is the first of its epoch."""
        return self.epoch_ended or self.steps == 0

    @property
    def last_epoch(self) -> int:
        """Of the last batch."""
        return self.position.epoch - self.epoch_ended

    def advance(self, position: Position, batches: int) -> None:
        """So many more are trained, of one epoch, which led to `position`."""
        self.epoch_started = self.starts_epoch and batches == 1
        self.steps += batches
        self.epoch_ended = position.epoch > self.position.epoch
        self.position = position


@dataclass(frozen=True)
class TrainUnit:
    """An amount of training: how long, how often, or when.

    `value` is a whole number, for a length or a period, or a container of them, for a schedule.

    A period below 1 is due after every batch. Use `Batch` or `Epoch`.
    """

    value: int | Container[int]

    def __post_init__(self) -> None:
        """Raises UsageError for anything else."""
        is_schedule = isinstance(self.value, Container) and not isinstance(self.value, (str, bytes))
        if isinstance(self.value, bool) or not (isinstance(self.value, int) or is_schedule):
            kind = type(self).__name__
            raise UsageError(f"{kind}({self.value!r}): give a whole number, such as {kind}(100), or a list of them")

    def due(self, progress: Progress) -> bool:
        """Whether the last batch completed a period, or what a schedule names."""
        raise NotImplementedError

    def reached(self, progress: Progress) -> bool:
        """Whether training of this length is at its end."""
        return self._done(progress) >= self.length

    @property
    def length(self) -> int:
        """Raises TypeError for a schedule, which is no length; UsageError for one of nothing."""
        if not isinstance(self.value, int):
            raise TypeError(
                f"max_length: {self} is a schedule; give a whole number, such as {type(self).__name__}(100)"
            )
        if self.value < 1:
            raise UsageError(f"max_length: {self} trains nothing; give at least {type(self).__name__}(1)")
        return self.value

    def next_boundary(self, steps: int) -> float:
        """The number of batches after `steps` at which this may be due; infinity where it only is at epochs' ends."""
        return math.inf

    def batches(self, batches_per_epoch: int | Fraction | None) -> int:
        """This length in batches. Raises UsageError for epochs of a loader whose length nobody knows."""
        raise NotImplementedError

    def _done(self, progress: Progress) -> int:
        raise NotImplementedError

    def _matches(self, count: int) -> bool:
        if isinstance(self.value, int):
            return self.value < 1 or count % self.value == 0
        return count in self.value


class Batch(TrainUnit):
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
    def due(self, progress: Progress) -> bool:
        return progress.epoch_ended and self._matches(progress.position.epoch)

    def batches(self, batches_per_epoch: int | Fraction | None) -> int:
        if batches_per_epoch is None:
            raise UsageError(
                f"{self}: the training loader has no length, so nobody can say where an epoch ends; "
                f"give the length in batches, or the loader a __len__"
            )
        return math.ceil(self.length * batches_per_epoch)

    def _done(self, progress: Progress) -> int:
        return progress.position.epoch


def unit_from_config(config: Mapping[str, int] | int, global_batch_size: int | None) -> TrainUnit:
    """Of `{batches: 5}`, `{epochs: 5}`, `{records: 500}` or 5 (batches). Records become batches of the global size.

    That rule for records is upstream's: max(records // global_batch_size, 1).
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
    """What a length in a configuration is counted in: batches, records or epochs."""
    return next(iter(config)) if isinstance(config, Mapping) else "batches"


def period_from_config(config: Mapping[str, int] | int, global_batch_size: int | None) -> TrainUnit | None:
    """None for a period of zero, which in a config means at the end only."""
    amount = next(iter(config.values())) if isinstance(config, Mapping) else config
    return unit_from_config(config, global_batch_size) if amount else None


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
