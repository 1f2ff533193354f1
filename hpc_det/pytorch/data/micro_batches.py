"""How many batches of the loader make one batch of training, and how often a rank evaluates in a validation.

Gradient accumulation and pipelines take several micro batches for one batch; in a validation ranks evaluate each on
their own, or together, and then equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import islice
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


class Evaluation(Enum):
    """Who takes part in one call of evaluate_batch."""

    APART = "one rank: it has as many rounds as batches"
    TOGETHER = "all ranks, one batch each: as many rounds as the longest share has batches"
    PIPELINED = "all ranks, several whole micro batches each: as many rounds as the shortest share makes"


@dataclass(frozen=True)
class Rounds:
    """Of one rank."""

    number: int | None = None
    """None: until the batches come to their end."""
    counted: int = 0
    """So many count; in those after them the rank keeps the others company."""
    per_round: int = 1
    """Batches."""

    @property
    def taken(self) -> int:
        """Batches in all, where their number is known."""
        return (self.number or 0) * self.per_round

    def of(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        """For each: what its evaluation takes batches from, which is `batches`, and whether it counts.

        Raises UsageError for one that takes none, where it is their end that ends the rounds.
        """
        if self.number is None:
            return _until_the_end(iter(()) if batches is None else batches)
        return ((batches, number < self.counted) for number in range(self.number))


def rounds_of(evaluation: Evaluation, own: int | None, lengths: list[int | None], per_batch: int) -> Rounds:
    """`own`: batches of this rank; `lengths`: of all that load. `per_batch`: of a pipeline, for one evaluation.

    Raises UsageError where ranks evaluate together and one has no batch, or does not say how many it has.
    """
    if evaluation is Evaluation.APART:
        return Rounds()
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        raise UsageError(
            "build_validation_data_loader: a loader has no len(), and all ranks have to evaluate equally often; "
            "give it a __len__, on all ranks that load"
        )
    if evaluation is Evaluation.TOGETHER:
        return Rounds(max(known), counted=own or 0)
    number = min(known) // per_batch
    if not number:
        raise UsageError(
            f"build_validation_data_loader: a rank has {min(known)} whole micro batches, and one evaluation of the "
            f"pipeline takes {per_batch} (gradient_accumulation_steps); use fewer of them, smaller ones, or more data"
        )
    return Rounds(number, counted=number, per_round=per_batch)


class Ahead:
    """An iterator that knows whether there is one more."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._ahead: list[Any] = []
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._ahead.pop() if self._ahead else next(self._batches)
        self.given += 1
        return batch

    def has_more(self) -> bool:
        if not self._ahead:
            self._ahead.extend(islice(self._batches, 1))
        return bool(self._ahead)


def _until_the_end(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    ahead = Ahead(batches)
    while ahead.has_more():
        before = ahead.given
        yield ahead, True
        if ahead.given == before:  # it would never come to an end
            raise UsageError("evaluate_batch: it took no batch from dataloader_iter; take one in each call")
