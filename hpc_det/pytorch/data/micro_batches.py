"""The number of loader batches that make up one training batch, and of evaluations per rank in a validation.

Gradient accumulation and pipelines use several micro batches per batch. In a validation each rank evaluates alone, or
all ranks evaluate together and then equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpc_det.core.progress import Position
from hpc_det.errors import UsageError

if TYPE_CHECKING:
    from hpc_det.pytorch.data import TrainingData


class MicroBatches:
    """Training data whose batch is the next `per_batch` micro batches; the last ones may belong to the next epoch.

    A position counts records (or the external loader's batches), as that of micro batches does, so a resume with
    another `per_batch` also continues at the right micro batch.
    """

    def __init__(self, loading: TrainingData, per_batch: int) -> None:
        """Raises UsageError if an epoch has fewer than `per_batch` micro batches."""
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
        # One by one, because an epoch's last micro batches may have another size.
        end = position
        for _ in range(count):
            end = self._loading.after(end)
        if end.epoch > position.epoch + 1:
            raise self._too_few(f"a batch would end both epoch {position.epoch} and epoch {position.epoch + 1}")
        return end

    def batches(self, position: Position) -> Iterator[Any]:
        """Yield the micro batches, one by one."""
        return self._loading.batches(position)

    def close(self) -> None:
        self._loading.close()

    def _too_few(self, what: str) -> UsageError:
        return UsageError(
            f"build_training_data_loader: {what}; {self._per_batch} micro batches make a batch "
            f"(gradient_accumulation_steps); use fewer or smaller micro batches, or more data"
        )


class Counted:
    """An iterator of training's micro batches that counts how many each batch took."""

    def __init__(self, batches: Iterator[Any], per_batch: int | None) -> None:
        """`per_batch`: micro batches that each batch has to take; None: any number."""
        self._batches = batches
        self._per_batch = per_batch
        self._taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._taken += 1
        return next(self._batches)

    def end_batch(self, number: int) -> None:
        """End batch `number`. Raises UsageError if it took too few or too many micro batches."""
        # With a wrong number all later batches would consist of other micro batches than their positions say.
        taken, self._taken = self._taken, 0
        if self._per_batch not in (None, taken):
            raise UsageError(
                f"train_batch: batch {number} took {taken} micro batches from dataloader_iter, but {self._per_batch} "
                f"make a batch (gradient_accumulation_steps); take one per call. If train_batch is called once per "
                f"batch (in a pipeline, or after context.disable_auto_grad_accumulation()), take all of them"
            )


class Evaluation(Enum):
    """The ranks that take part in one call of evaluate_batch."""

    APART = "one rank: its number of rounds is its number of batches"
    TOGETHER = "all ranks, one batch each: as many rounds as the longest share has batches"
    PIPELINED = "all ranks, several whole micro batches each: as many rounds as the shortest share allows"


@dataclass(frozen=True)
class Rounds:
    """The evaluations of one rank in one validation."""

    number: int | None = None
    """The number of rounds; None: until the batches end."""
    counted: int = 0
    """The number of rounds whose results count; in later rounds the rank only takes part for the other ranks."""
    per_round: int = 1
    """Batches per round."""

    @property
    def taken(self) -> int:
        """The total number of batches, if the number of rounds is known; otherwise 0."""
        return (self.number or 0) * self.per_round

    def of(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        """Yield, for each round, the iterator to take its batches from, and whether its result counts.

        If the rounds end with the batches, a round that takes no batch raises UsageError.
        """
        if self.number is None:
            return _until_the_end(iter(()) if batches is None else batches)
        return ((batches, number < self.counted) for number in range(self.number))


def rounds_of(evaluation: Evaluation, own: int | None, lengths: list[int | None], per_batch: int) -> Rounds:
    """Return the rounds of this rank. `own`: its number of batches; `lengths`: those of all ranks that load.

    `per_batch`: batches in one evaluation of a pipeline. Raises UsageError if ranks evaluate together and one has no
    batch or no known length.
    """
    if evaluation is Evaluation.APART:
        return Rounds()
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths):
        raise UsageError(
            "build_validation_data_loader: a loader has no len(), but all ranks have to evaluate equally often; "
            "give it a __len__, on all ranks that load"
        )
    if evaluation is Evaluation.TOGETHER:
        return Rounds(max(known), counted=own or 0)
    number = min(known) // per_batch
    if not number:
        raise UsageError(
            f"build_validation_data_loader: a rank has {min(known)} whole micro batches, but one evaluation of the "
            f"pipeline takes {per_batch} (gradient_accumulation_steps); use fewer or smaller micro batches, or more "
            f"data"
        )
    return Rounds(number, counted=number, per_round=per_batch)


class Ahead:
    """An iterator with one item of lookahead, so that it can report whether there is another item."""

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
        if ahead.given == before:  # otherwise this loop would never end
            raise UsageError("evaluate_batch: it took no batch from dataloader_iter; take one in each call")
