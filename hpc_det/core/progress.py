"""The progress of a training, its file in a checkpoint, and the units in which lengths and periods are counted."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.content import load
from hpc_det.errors import UsageError

PROGRESS = "progress.pth"
"""The file of a checkpoint with the progress and the number of ranks."""


@dataclass(frozen=True, slots=True)
class Position:
    """A position in training: `done` items of epoch `epoch` are done, and all earlier epochs are complete.

    An item is a record; with a batch sampler or an external loader it is a batch.
    """

    epoch: int = 0
    done: int = 0


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
    tail: str = ""
    """"pass" or "length" if `batches` has ended there, but not the loop's body around it (see hpc_det.core.bodies)."""
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


def progress_state(progress: Progress, ranks: int) -> dict[str, Any]:
    """Return the content of progress.pth. `ranks`: the size of the gang."""
    return {**asdict(progress), "ranks": ranks}


def restored_progress(folder: Path) -> tuple[Progress, int]:
    """Return the progress and the number of ranks of the saved gang."""
    state = load(folder / PROGRESS)
    ranks = state.pop("ranks")
    return Progress(**{**state, "position": Position(**state["position"])}), ranks


# --- units


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

    def passed(self, before: Position, now: Position) -> bool:
        """Return whether a period was completed between two positions; `done` counts batches of the whole training."""
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

    def passed(self, before: Position, now: Position) -> bool:
        return self.next_boundary(before.done) <= now.done

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

    def passed(self, before: Position, now: Position) -> bool:
        return any(map(self._matches, range(before.epoch + 1, now.epoch + 1)))

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
