"""Loaders that are not ours: they shard, shuffle and skip by themselves, and are taken as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import torch

from hpc_det.errors import UsageError
from hpc_det.pytorch.data.micro_batches import Rounds
from hpc_det.pytorch.data.partition import Position
from hpc_det.pytorch.data.workers import end_workers, shield, with_live_workers


def length_of(loader: object) -> int | None:
    """Its len(); None where it has none, as torch's loader of an IterableDataset without one."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    if hasattr(loader, "_IterableDataset_len_called"):
        # torch warns at every batch beyond a length that was asked for, and training goes on beyond it.
        loader._IterableDataset_len_called = None
    return length


class ExternalLoader:
    kind: ClassVar[str]

    def __init__(self, loader: Iterable[Any]) -> None:
        shield(loader)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.loads_in_workers = bool(getattr(loader, "num_workers", 0))

    def close(self) -> None:
        end_workers(self._iterator)

    def _begin(self) -> Iterator[Any]:
        self._iterator = iterated(self._loader, self._iterator)
        return self._iterator

    def _endless(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """One that comes to its end is iterated again."""
        again = ""
        while True:
            empty = True
            for batch in iterator:
                empty = False
                yield batch
            if empty:
                raise self._problem(
                    f"gives no batch{again}; return a loader that can be iterated over and over, or that never ends"
                )
            iterator = self._begin()
            again = " when it is iterated again"

    def _problem(self, what: str) -> UsageError:
        return UsageError(f"build_{self.kind}_data_loader: the {type(self._loader).__name__} {what}")


class ExternalTraining(ExternalLoader):
    """Counts batches."""

    kind = "training"
    is_shared_out = False

    def __init__(self, loader: Iterable[Any], batches_per_epoch: int | None) -> None:
        super().__init__(loader)
        self.batches_per_epoch = batches_per_epoch
        if batches_per_epoch == 0:
            raise self._problem("has no batches; training needs at least one")

    def whole_batches(self, position: Position) -> int:
        """Without a length: of an epoch that never ends."""
        return sys.maxsize if self.batches_per_epoch is None else self.batches_per_epoch - position.done

    def after(self, position: Position, batches: int = 1) -> Position:
        done = position.done + batches
        if self.batches_per_epoch is not None and done >= self.batches_per_epoch:
            return Position(position.epoch + 1)
        return Position(position.epoch, done)

    def batches(self, position: Position) -> Iterator[Any]:
        """Its iterator is made here, not at the first batch: that may draw random numbers."""
        return self._endless(self._begin())


class ExternalValidation(ExternalLoader):
    """Each rank's own loader, all of it."""

    kind = "validation"

    def __init__(self, loader: Iterable[Any], rounds: Rounds, size: int) -> None:
        """`size`: ranks; the only one must have a batch, and each where all evaluate together."""
        super().__init__(loader)
        self._rounds = rounds
        self._together = rounds.number is not None
        own = length_of(loader)
        self.length = rounds.number if self._together else own
        if own == 0 and (size == 1 or self._together):
            raise self._problem("has no batches; validation needs at least one")

    def batches(self) -> Iterator[Any]:
        batches = self._begin()
        return islice(self._endless(batches), self._rounds.taken) if self._together else batches

    def rounds(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        return self._rounds.of(batches)

    def whole(self) -> Iterable[Any]:
        return self._loader


def iterated(loader: Iterable[Any], former: Iterator[Any] | None) -> Iterator[Any]:
    """A new iterator; the former one ends, unless it is used again, as with persistent workers."""
    begin = functools.partial(iter, loader)
    iterator: Iterator[Any] = (
        with_live_workers(loader, begin) if isinstance(loader, torch.utils.data.DataLoader) else begin()
    )
    if iterator is not former:
        end_workers(former)
    return iterator
