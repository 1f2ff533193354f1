"""Amounts of training: how long, how often, or when."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from fractions import Fraction

from hpc_det.errors import UsageError
from hpc_det.pytorch.loop.progress import Progress


@dataclass(frozen=True)
class TrainUnit:
    """`value` is a whole number, for a length or a period, or a container of them, for a schedule.

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
