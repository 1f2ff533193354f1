"""Loaders that are not ours: they shard, shuffle and skip by themselves, and are taken as they are.

For PyTorchTrial they also find their place again by themselves (ExternalTraining, ExternalValidation). RaySGD's
operators are put back to their place: a pass that a snapshot left open is replayed (ReplayedLoader).
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpc_det.distributed.rng import restore_rng, rng_state, unchanged_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.data.micro_batches import Rounds
from hpc_det.pytorch.data.order import set_epoch
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
    """A loader of the user's own, and the iterator over it that is open."""

    def __init__(self, loader: Iterable[Any]) -> None:
        shield(loader)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.loads_in_workers = bool(getattr(loader, "num_workers", 0))

    def close(self) -> None:
        """End worker processes."""
        end_workers(self._iterator)
        self._iterator = None

    def _begin(self) -> Iterator[Any]:
        """Return a new iterator; the former one ends, unless it is used again, as with persistent workers."""
        loader, begin = self._loader, functools.partial(iter, self._loader)
        iterator: Iterator[Any] = with_live_workers(loader, begin) if isinstance(loader, DataLoader) else begin()
        if iterator is not self._iterator:
            end_workers(self._iterator)
        self._iterator = iterator
        return iterator


class _OfTrial(ExternalLoader):
    kind: ClassVar[str]

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


class ExternalTraining(_OfTrial):
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


class ExternalValidation(_OfTrial):
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


class ReplayedLoader(ExternalLoader):
    """A loader whose passes are replayed: begun alike, and so many batches skipped.

    What is replayed: torch's, numpy's and Python's generators, those of the loader and its sampler, `set_epoch`. A
    sampler, data set or iterator that keeps any other state begins anew, as an iterator that can be iterated only once
    does.
    """

    counts: ClassVar[str] = "batches"

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(loader)
        self.generators = generators_of(loader)
        self._began: dict[str, Any] = {}

    def begin(self, epoch: int) -> Iterator[Any]:
        for sampler in _samplers(self._loader):
            set_epoch(sampler, epoch)
        if epoch and getattr(self._loader, "persistent_workers", False) and self._iterator is None:
            self._start_workers()
        self._began = {"rng": rng_state(), "generators": [generator.get_state() for generator in self.generators]}
        return self._begin()

    def _start_workers(self) -> None:
        """Before the pass: torch draws a seed for persistent workers in their first pass alone."""
        states = [generator.get_state() for generator in self.generators]
        with unchanged_generators():
            self._begin()
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def resume(self, epoch: int, done: int, began: dict[str, Any] | None) -> Iterator[Any]:
        """Global generators are what they were, afterwards; those of the loader are the caller's to put back."""
        with unchanged_generators():
            if began:
                restore_rng(began["rng"])
                for generator, state in zip(self.generators, began["generators"], strict=False):
                    generator.set_state(state)
            iterator = self.begin(epoch)
            deque(islice(iterator, done), maxlen=0)
        return iterator

    def began(self) -> dict[str, Any]:
        return self._began

    def after(self, done: int) -> int:
        return done + 1

    def left(self, done: int) -> int | None:
        """An iterable data set's word is not taken for it: torch itself takes that for a guess."""
        if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
            return None
        length = length_of(self._loader)
        return None if length is None else max(length - done, 0)


def generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """Each once: torch gives its samplers the loader's."""
    owners = [loader, *_samplers(loader), *(getattr(sampler, "sampler", None) for sampler in _samplers(loader))]
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _samplers(loader: Iterable[Any]) -> list[Any]:
    found = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return [sampler for sampler in found if sampler is not None]
