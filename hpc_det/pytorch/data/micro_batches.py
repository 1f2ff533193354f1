"""Batches that are made of several micro batches of the loader, as gradient accumulation and pipelines take them."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from hpc_det.errors import UsageError
from hpc_det.pytorch.data.partition import Position

if TYPE_CHECKING:
    from hpc_det.pytorch.data import TrainingData


class MicroBatches:
    """A batch is the next `per_batch` micro batches, of which the last may be of the next epoch.

    Positions are those of the micro batches, so a resume with another `per_batch` goes on at the right one, too.
    """

    def __init__(self, loading: TrainingData, per_batch: int) -> None:
        """Raises UsageError where an epoch does not make one batch."""
        self._loading = loading
        self._per_batch = per_batch
        self.loads_in_workers = loading.loads_in_workers
        self.is_shared_out = loading.is_shared_out
        per_epoch = loading.batches_per_epoch
        if per_epoch is not None and per_epoch < per_batch:
            raise self._too_few(f"an epoch has {per_epoch} micro batches")
        self.batches_per_epoch = None if per_epoch is None else Fraction(per_epoch, per_batch)

    def whole_batches(self, position: Position) -> int:
        return self._loading.whole_batches(position) // self._per_batch

    def after(self, position: Position, batches: int = 1) -> Position:
        """Raises UsageError for a batch that would end two epochs."""
        count = batches * self._per_batch
        if count <= self._loading.whole_batches(position):
            return self._loading.after(position, count)
        end = position
        for _ in range(count):
            end = self._loading.after(end)
        if end.epoch > position.epoch + 1:
            raise self._too_few(f"a batch would end epoch {position.epoch} and epoch {position.epoch + 1}, too")
        return end

    def batches(self, position: Position) -> Iterator[Any]:
        """The micro batches, one by one."""
        return self._loading.batches(position)

    def close(self) -> None:
        self._loading.close()

    def _too_few(self, what: str) -> UsageError:
        return UsageError(
            f"build_training_data_loader: {what}; {self._per_batch} micro batches make a batch "
            f"(gradient_accumulation_steps); use fewer of them, smaller ones, or more data"
        )


class Counted:
    """An iterator of training's micro batches, which knows how many each batch took."""

    def __init__(self, batches: Iterator[Any], per_batch: int | None) -> None:
        """`per_batch`: how many each has to take; None: as many as it likes."""
        self._batches = batches
        self._per_batch = per_batch
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._taken += 1
        return next(self._batches)

    def end_batch(self, number: int) -> None:
        """After batch `number`. Raises UsageError where it took too few or too many: the next would be another one."""
        taken, self._taken = self._taken, 0
        if self._per_batch not in (None, taken):
            raise UsageError(
                f"train_batch: batch {number} took {taken} micro batches from dataloader_iter, and {self._per_batch} "
                f"make a batch (gradient_accumulation_steps); take one in each call, or, after "
                f"context.disable_auto_grad_accumulation() and in a pipeline, which are called once, all of them"
            )
