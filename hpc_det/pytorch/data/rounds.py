"""How often a rank evaluates in a validation, where ranks do so together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Any

from hpc_det.errors import UsageError


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
