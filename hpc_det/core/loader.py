"""Passes over any loader of a user, which can be resumed in the middle."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from hpc_det.core.loader_workers import end_workers, shield, with_live_workers
from hpc_det.distributed.rng import restore_rng, rng_state, unchanged_generators


def length_of(loader: object) -> int | None:
    """Return len(loader); None if it has none, such as torch's loader of an IterableDataset without a length."""
    try:
        length = len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    if hasattr(loader, "_IterableDataset_len_called"):
        # Once len() was called, torch warns at every batch beyond it; training continues beyond it.
        loader._IterableDataset_len_called = None
    return length


class ExternalLoader:
    """An external loader and the open iterator over it."""

    def __init__(self, loader: Iterable[Any]) -> None:
        shield(loader)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self.loads_in_workers = bool(getattr(loader, "num_workers", 0))

    def close(self) -> None:
        """End the worker processes."""
        end_workers(self._iterator)
        self._iterator = None

    def _begin(self) -> Iterator[Any]:
        """Return a new iterator. The previous one is ended, unless torch reuses it, as with persistent workers."""
        loader, begin = self._loader, functools.partial(iter, self._loader)
        iterator: Iterator[Any] = with_live_workers(loader, begin) if isinstance(loader, DataLoader) else begin()
        if iterator is not self._iterator:
            end_workers(self._iterator)
        self._iterator = iterator
        return iterator


class ReplayedLoader(ExternalLoader):
    """A loader whose passes are replayed: started in the same state, with the batches that were done skipped.

    The replayed state: torch's, numpy's and Python's generators, those of the loader and its sampler, and `set_epoch`.
    A sampler, data set or iterator with any other state starts from its beginning, as does an iterator that can be
    iterated only once.
    """

    counts: ClassVar[str] = "batches"
    """The unit of a position in a pass."""

    def __init__(self, loader: Iterable[Any]) -> None:
        super().__init__(loader)
        self.generators = generators_of(loader)
        self._began: dict[str, Any] = {}

    def begin(self, epoch: int) -> Iterator[Any]:
        """Return an iterator of `epoch`, and record the state in which it is started; see `began`."""
        for sampler in _samplers(self._loader):
            set_epoch(sampler, epoch)
        if epoch and getattr(self._loader, "persistent_workers", False) and self._iterator is None:
            self._start_workers()
        self._began = {"rng": rng_state(), "generators": [generator.get_state() for generator in self.generators]}
        return self._begin()

    def _start_workers(self) -> None:
        """Start persistent workers before the pass, without changing any generator."""
        # torch draws a seed for persistent workers in their first pass only. A replayed pass that is not the first one
        # must not draw it.
        states = [generator.get_state() for generator in self.generators]
        with unchanged_generators():
            self._begin()
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def resume(self, epoch: int, done: int, began: dict[str, Any] | None) -> Iterator[Any]:
        """Return an iterator of `epoch` after `done` batches, started in the state `began`.

        Global generators are restored afterwards; the caller restores the generators of the loader.
        """
        with unchanged_generators():
            if began:
                restore_rng(began["rng"])
                for generator, state in zip(self.generators, began["generators"], strict=False):
                    generator.set_state(state)
            iterator = self.begin(epoch)
            deque(islice(iterator, done), maxlen=0)
        return iterator

    def began(self) -> dict[str, Any]:
        """Return the state of the generators in which the open pass was started, for `resume`."""
        return self._began

    def after(self, done: int) -> int:
        """Return the number of batches that are done after the next one."""
        return done + 1

    def left(self, done: int) -> int | None:
        """Return the number of batches left; None if it is unknown."""
        # torch treats the length of an IterableDataset as a guess, and so does this.
        if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
            return None
        length = length_of(self._loader)
        return None if length is None else max(length - done, 0)


def generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """Return the generators of the loader and its samplers, each once: torch passes the loader's to its samplers."""
    owners = [loader, *_samplers(loader), *(getattr(sampler, "sampler", None) for sampler in _samplers(loader))]
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _samplers(loader: Iterable[Any]) -> list[Any]:
    found = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return [sampler for sampler in found if sampler is not None]


def set_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` of the sampler and of samplers inside it (attribute `sampler`, as torch's BatchSampler has)."""
    while sampler is not None:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        sampler = getattr(sampler, "sampler", None)
