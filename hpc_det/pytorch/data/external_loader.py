"""External loaders: loaders other than hpc_det's, which shard, shuffle and skip themselves and are used unchanged.

Under PyTorchTrial they must also find their position after a resume themselves (ExternalTraining, ExternalValidation).
Under RaySGD's operators they are restored to their position: a pass that was open at a snapshot is replayed
(ReplayedLoader).
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

from hpc_det.core.progress import Position
from hpc_det.distributed.rng import restore_rng, rng_state, unchanged_generators
from hpc_det.errors import UsageError
from hpc_det.pytorch.data.micro_batches import Rounds
from hpc_det.pytorch.data.order import set_epoch
from hpc_det.pytorch.data.workers import end_workers, shield, with_live_workers


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


class _OfTrial(ExternalLoader):
    """An external loader of a trial."""

    kind: ClassVar[str]
    """ "training" or "validation"."""

    def _endless(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the iterator's batches, then iterate the loader again, endlessly."""
        again = ""
        while True:
            empty = True
            for batch in iterator:
                empty = False
                yield batch
            if empty:
                raise self._problem(
                    f"gives no batch{again}; return a loader that can be iterated repeatedly, or that never ends"
                )
            iterator = self._begin()
            again = " when it is iterated again"

    def _problem(self, what: str) -> UsageError:
        return UsageError(f"build_{self.kind}_data_loader: the {type(self._loader).__name__} {what}")


class ExternalTraining(_OfTrial):
    """Training data from an external loader (see TrainingData). A position counts batches."""

    kind = "training"
    is_shared_out = False

    def __init__(self, loader: Iterable[Any], batches_per_epoch: int | None) -> None:
        super().__init__(loader)
        self.batches_per_epoch = batches_per_epoch
        if batches_per_epoch == 0:
            raise self._problem("has no batches; training needs at least one")

    def whole_batches(self, position: Position) -> int:
        """Return the batches left in the epoch; sys.maxsize without a length, because the epoch never ends."""
        return sys.maxsize if self.batches_per_epoch is None else self.batches_per_epoch - position.done

    def after(self, position: Position, batches: int = 1) -> Position:
        done = position.done + batches
        if self.batches_per_epoch is not None and done >= self.batches_per_epoch:
            return Position(position.epoch + 1)
        return Position(position.epoch, done)

    def batches(self, position: Position) -> Iterator[Any]:
        """Return the batches from the loader's beginning: it must find `position` itself."""
        # The iterator is made now, not at the first batch, because making it may draw random numbers.
        return self._endless(self._begin())


class ExternalValidation(_OfTrial):
    """Validation data from an external loader: each rank evaluates its whole loader (see ValidationData)."""

    kind = "validation"

    def __init__(self, loader: Iterable[Any], rounds: Rounds, size: int) -> None:
        """`size`: number of ranks. Raises UsageError for an empty loader on the only rank, or if all evaluate together.

        An empty loader on one of several ranks is allowed if each evaluates alone.
        """
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
