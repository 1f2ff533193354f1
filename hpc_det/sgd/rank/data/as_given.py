"""A loader as the user made it. A pass that a snapshot left open is replayed: begun alike, and so many batches skipped.

What is replayed: torch's, numpy's and Python's generators, those of the loader and its sampler, `set_epoch`. A sampler,
data set or iterator that keeps any other state begins anew, as an iterator that can be iterated only once does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset

from hpc_det.distributed.rng import restore_rng, rng_state, unchanged_generators
from hpc_det.pytorch.data.external_loader import iterated, length_of
from hpc_det.pytorch.data.order import set_epoch
from hpc_det.pytorch.data.workers import end_workers, shield


class AsGiven:
    counts: ClassVar[str] = "batches"

    def __init__(self, loader: Iterable[Any]) -> None:
        shield(loader)
        self.generators = generators_of(loader)
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._began: dict[str, Any] = {}

    def begin(self, epoch: int) -> Iterator[Any]:
        for sampler in _samplers(self._loader):
            set_epoch(sampler, epoch)
        if epoch and getattr(self._loader, "persistent_workers", False) and self._iterator is None:
            self._start_workers()
        self._began = {"rng": rng_state(), "generators": [generator.get_state() for generator in self.generators]}
        self._iterator = iterated(self._loader, self._iterator)
        return self._iterator

    def _start_workers(self) -> None:
        """Before the pass: torch draws a seed for persistent workers in their first pass alone."""
        states = [generator.get_state() for generator in self.generators]
        with unchanged_generators():
            self._iterator = iterated(self._loader, None)
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

    def close(self) -> None:
        end_workers(self._iterator)
        self._iterator = None


def generators_of(loader: Iterable[Any]) -> list[torch.Generator]:
    """Each once: torch gives its samplers the loader's."""
    owners = [loader, *_samplers(loader), *(getattr(sampler, "sampler", None) for sampler in _samplers(loader))]
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _samplers(loader: Iterable[Any]) -> list[Any]:
    found = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return [sampler for sampler in found if sampler is not None]
