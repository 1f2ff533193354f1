"""Loaders that are not ours: they shard, shuffle and skip by themselves, and are taken as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hpc_det.errors import UsageError
from hpc_det.pytorch.data.shares import Position
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


class ForeignTraining:
    """Counts batches. A loader that comes to its end is iterated again."""

    def __init__(self, loader: Iterable[Any], batches_per_epoch: int | None) -> None:
        shield(loader)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.batches_per_epoch = batches_per_epoch if batches_per_epoch is not None else length_of(loader)
        self.loads_in_workers = _loads_in_workers(loader)
        if self.batches_per_epoch == 0:
            raise UsageError(f"build_training_data_loader: {_name(loader)} has no batches; training needs at least one")

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
        self._iterator = _iterated(self._loader, self._iterator)
        return self._endless(self._iterator)

    def _endless(self, iterator: Iterator[Any]) -> Iterator[Any]:
        again = ""
        while True:
            empty = True
            for batch in iterator:
                empty = False
                yield batch
            if empty:
                raise UsageError(
                    f"build_training_data_loader: {_name(self._loader)} gives no batch{again}; return a loader that "
                    f"can be iterated over and over, or that never ends"
                )
            self._iterator = iterator = _iterated(self._loader, iterator)
            again = " when it is iterated again"

    def close(self) -> None:
        end_workers(self._iterator)


class ForeignValidation:
    """Each rank's own loader, all of it."""

    def __init__(self, loader: Iterable[Any], size: int) -> None:
        """`size`: ranks; the only one must have a batch."""
        shield(loader)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.loads_in_workers = _loads_in_workers(loader)
        self.length = length_of(loader)
        if size == 1 and self.length == 0:
            raise UsageError(
                f"build_validation_data_loader: {_name(loader)} has no batches; validation needs at least one"
            )

    def batches(self) -> Iterator[Any]:
        self._iterator = _iterated(self._loader, self._iterator)
        return self._iterator

    def whole(self) -> Iterable[Any]:
        return self._loader

    def close(self) -> None:
        end_workers(self._iterator)


def _iterated(loader: Iterable[Any], former: Iterator[Any] | None) -> Iterator[Any]:
    """A new iterator; the former one ends, unless it is used again, as with persistent workers."""
    begin = functools.partial(iter, loader)
    iterator: Iterator[Any] = (
        with_live_workers(loader, begin) if isinstance(loader, torch.utils.data.DataLoader) else begin()
    )
    if iterator is not former:
        end_workers(former)
    return iterator


def _loads_in_workers(loader: object) -> bool:
    return bool(getattr(loader, "num_workers", 0))


def _name(loader: object) -> str:
    return f"the {type(loader).__name__}"
