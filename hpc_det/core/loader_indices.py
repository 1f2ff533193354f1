"""A cut of a pass by index: a torch loader's pass that begins after some batches, without reading their records.

While an iterator of the loader is made, CutSampler replaces the loader's index sampler (its batch sampler; its sampler
if batch_size is None). It draws the indices of the batches that are done from the original sampler and drops them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpc_det.core.external_loader import samplers_of
from hpc_det.distributed.rng import mixed_seed, restore_rng, seed_generators

Moment = tuple[int, dict[str, Any]]
"""The number of a batch, and the state of the generators to set before its index is drawn or the pass ends."""


class SeededIndex:
    """An index batch for a worker: unpickling it seeds the worker's generators and returns the plain index batch.

    torch's worker unpickles the index of a batch just before it reads the records.
    """

    def __init__(self, index: Any, seed: int) -> None:
        self._index = index
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _seeded, (self._index, self._seed)


def _seeded(index: Any, seed: int) -> Any:
    seed_generators(seed)
    return index


class CutIndices:
    """The index batches of a pass after the first `done` ones, which are skipped at the first access."""

    def __init__(
        self, indices: Iterator[Any], *, epoch: int, done: int, seed: int | None, moment: Moment | None
    ) -> None:
        self._indices = indices
        self._epoch = epoch
        self._done = done
        self._seed = seed
        self._moment = moment
        self._number = 0
        """The number of the next batch of the pass."""
        self._first: list[Any] = []

    def start(self) -> None:
        """Skip the batches that are done, or draw the first index batch if none is. Repeated calls do nothing.

        Samplers draw the order of a pass with their first index. If that were left to the first access, another loader
        that begins before it would change the order.
        """
        self._skip()
        if not self._number and not self._first:
            self._first = list(islice(self._indices, 1))

    def _skip(self) -> None:
        if self._number < self._done:  # checked first: this is called for each batch
            deque(islice(self._indices, self._done - self._number), maxlen=0)
            self._number = self._done

    def __iter__(self) -> CutIndices:
        return self

    def __next__(self) -> Any:
        self._skip()
        if self._moment and self._number >= self._moment[0]:
            self._set_generators()
        try:
            index, number = self._first.pop() if self._first else next(self._indices), self._number
        except StopIteration:
            self._set_generators()
            raise
        self._number += 1
        if self._seed is None:
            return index
        return SeededIndex(index, mixed_seed("batch of a loader", self._seed, self._epoch, number))

    def _set_generators(self) -> None:
        """Set the generators to the state of the moment, once."""
        if self._moment:
            restore_rng(self._moment[1])
            self._moment = None


class CutSampler:
    """The index sampler of a torch loader, with a cut that its next iterations begin at.

    Other attributes are those of the original sampler. torch iterates it once or twice for an iterator of the loader,
    and keeps it in the iterator of persistent workers.
    """

    def __init__(self, loader: DataLoader[Any], seed: int | None) -> None:
        """`seed`: worker generators are seeded for each batch with it; None: they are not."""
        self._loader = loader
        self._name = _index_sampler_of(loader)
        self._sampler: Any = getattr(loader, self._name)
        self._seed = seed
        self._cut = _WHOLE
        self._is_empty = False
        self._latest = CutIndices(iter(()), **_WHOLE, seed=None)

    @contextmanager
    def installed(self, epoch: int, done: int = 0, moment: Moment | None = None) -> Iterator[None]:
        """In the block, iterators of the loader begin after `done` batches of pass number `epoch`."""
        self._cut = {"epoch": epoch, "done": done, "moment": moment}
        with self._in_place():
            yield

    @contextmanager
    def installed_empty(self) -> Iterator[None]:
        """In the block, iterators of the loader give nothing, and the original sampler is not iterated."""
        self._is_empty = True
        with self._in_place():
            yield

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        # through vars(), because DataLoader refuses to have these attributes set
        attributes = vars(self._loader)
        original, attributes[self._name] = attributes[self._name], self
        try:
            yield
        finally:
            attributes[self._name] = original
            self._cut, self._is_empty = _WHOLE, False

    def start(self) -> None:
        """Skip the batches that are done in the latest iteration now, not at its first access; see CutIndices."""
        self._latest.start()

    def __iter__(self) -> Iterator[Any]:
        indices = iter(()) if self._is_empty else iter(self._sampler)
        self._latest = CutIndices(indices, **self._cut, seed=self._seed)
        return self._latest

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


_WHOLE: dict[str, Any] = {"epoch": 0, "done": 0, "moment": None}


def cut_sampler_of(loader: DataLoader[Any], seed: int | None) -> CutSampler | None:
    """Return the sampler that cuts passes of `loader`; None if its passes cannot be cut by index.

    They can be cut over a map-style data set, if torch's or torchdata's own code iterates the loader, and neither the
    data set nor a sampler has a state to restore. With workers a seed is needed, because the state of a worker's
    generators depends on all records that it has read.
    """
    if not _is_iterated_by_torch(loader) or isinstance(loader.dataset, IterableDataset):
        return None
    if any(hasattr(owner, "state_dict") for owner in (loader.dataset, *samplers_of(loader))):
        return None
    if loader.num_workers and seed is None:
        return None
    if _index_sampler_of(loader) not in vars(loader):
        return None
    return CutSampler(loader, seed if loader.num_workers else None)


def _is_iterated_by_torch(loader: DataLoader[Any]) -> bool:
    # A subclass of torchdata's loader that has more to save has its own state_dict.
    methods = (getattr(type(loader), name, None) for name in ("__iter__", "state_dict"))
    modules = {method.__module__.partition(".")[0] for method in methods if method is not None}
    return modules <= {"torch", "torchdata"}


def _index_sampler_of(loader: DataLoader[Any]) -> str:
    return "sampler" if loader.batch_sampler is None else "batch_sampler"
