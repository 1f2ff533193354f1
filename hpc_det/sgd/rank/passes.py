"""Passes of one rank over its data: they continue from call to call, and from the position in a snapshot."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from hpc_det.core.loader import ReplayedLoader
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.shards import Shards, order_of, takes_any_order


class Source(Protocol):
    """The data that passes are made over."""

    counts: ClassVar[str]
    """Unit of `done`, the position in a pass: "samples" of all ranks, or "batches" of this rank."""
    generators: list[torch.Generator]
    """The random generators that the user gave to the loader, apart from the global ones of torch and numpy."""

    def begin(self, epoch: int) -> Iterator[Any]:
        """Return the batches of pass number `epoch`, from 0."""
        ...

    def resume(self, epoch: int, done: int, began: dict[str, Any] | None) -> Iterator[Any]:
        """Return the batches of pass number `epoch` after the position `done`.

        `began`: what `began()` returned when the snapshot was taken; None on a rank that did not exist then.
        """
        ...

    def began(self) -> dict[str, Any]:
        """Return the data for resuming the open pass, besides its number and `done`, in a form for torch.save."""
        ...

    def finish(self) -> None:
        """End the open pass if all of its batches are done, so that the states of the generators are final."""
        ...

    def after(self, done: int) -> int:
        """Return the position after one more batch than at the position `done`."""
        ...

    def left(self, done: int) -> int | None:
        """Return the number of batches after the position `done`; None if the length of a pass is not known."""
        ...

    def close(self) -> None:
        """End the worker processes."""
        ...


class SizedBatches:
    """An iterator over batches with a length, which a progress bar needs."""

    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        """Return the number of all batches of the iterator, including those that were already drawn."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)


class Passes:
    """The passes over a loader of the user, one after another; `source_of` makes a Source from the loader.

    Without a loader every pass is empty.
    """

    def __init__(self, source_of: Callable[[Iterable[Any]], Source]) -> None:
        self.begun = 0
        """Number of passes that have begun: RaySGD's `epoch`."""
        self._source_of = source_of
        self._loader: Iterable[Any] = ()
        self._source: Source = ReplayedLoader(())
        self._iterator: Iterator[Any] | None = None
        self._done = 0
        """Position in the open pass, in the unit of the source."""
        self.drawn = 0
        """Number of batches drawn in all passes; the hang detector compares it over time."""

    @property
    def finished(self) -> int:
        """The number of completed passes. A pass without a known length completes only when its iterator ends."""
        return self.begun - self._is_open

    def over(self, loader: Iterable[Any]) -> Passes:
        """Make passes over `loader` from now on, and return self. With another loader, an open pass is abandoned."""
        if loader is not self._loader:  # `register_data` may be called again, with another loader
            self.close()
            self._loader, self._source = loader, self._source_of(loader)
        return self

    def batches(self, num_steps: int | None) -> Iterator[Any]:
        """Return an iterator over the next `num_steps` batches, from as many passes as needed.

        None: over the rest of the open pass. If no batch of it is left, or none is open, a new pass begins. A new pass
        without batches ends the iteration. The iterator has a len() if the number of batches is known.
        """
        length = self._source.left(self._done if self._is_open else 0) if num_steps is None else num_steps
        batches = self._batches(num_steps)
        return batches if length is None else SizedBatches(batches, length)

    def _batches(self, num_steps: int | None) -> Iterator[Any]:
        given = 0
        while num_steps is None or given < num_steps:
            is_new, before = self._open(), given
            for batch in self._rest(None if num_steps is None else num_steps - given):
                given += 1
                yield batch
            # Fewer batches than requested: the iterator has ended. All of them: the pass may end with the last one.
            if given != num_steps or not self._is_open:
                self._iterator = None
            is_empty = given == before
            if (is_empty and is_new) or (num_steps is None and not is_empty):
                return

    def _open(self) -> bool:
        """Begin a pass unless one is open; return whether one was begun."""
        if self._is_open:
            return False
        self._iterator, self._done = self._source.begin(self.begun), 0
        self.begun += 1
        return True

    def _rest(self, most: int | None) -> Iterator[Any]:
        """Yield the next batches of the open pass, at most `most`, and count them."""
        assert self._iterator is not None
        for batch in islice(self._iterator, most):
            self.drawn += 1
            # before the yield: if the caller stops iterating, the code after it does not run
            self._done = self._source.after(self._done)
            yield batch

    @property
    def _is_open(self) -> bool:
        return self._iterator is not None and self._source.left(self._done) != 0

    # --- snapshots

    def position(self) -> dict[str, Any]:
        """Return the position for `restore`; it is the same on all ranks if they have drawn equally many batches."""
        return {
            "begun": self.begun,
            "done": self._done if self._is_open else 0,
            "counts": self._source.counts,
            "is_open": self._is_open,
        }

    def own(self) -> dict[str, Any]:
        """Return the position and the generator states of this rank, taken together with `position`."""
        self._source.finish()
        return {
            "position": self.position(),
            "began": self._source.began() if self._is_open else None,
            "generators": [generator.get_state() for generator in self._source.generators],
        }

    def restore(self, position: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Continue at a position in a snapshot. Call it after `over`.

        `position`: that of rank 0; `own`: what `own()` returned on this rank, or None on a rank that did not exist
        then, which continues at rank 0's position.
        """
        if own:
            position = own["position"]
        self.restart(position["begun"])
        if not position["is_open"]:
            return
        # The units of `done` differ, for example, if num_workers was 1 and is larger now: repeat the whole pass.
        if position["counts"] != self._source.counts:
            self.begun -= 1
            return
        self._done = position["done"]
        self._iterator = self._source.resume(self.begun - 1, self._done, own["began"] if own else None)

    def restore_generators(self, own: dict[str, Any]) -> None:
        """Restore the user's generators. Call it after `restore` of all passes: loaders may share a generator."""
        for generator, state in zip(self._source.generators, own["generators"], strict=False):
            generator.set_state(state)

    def restart(self, begun: int) -> None:
        """Set the position to the start of the next pass, after `begun` passes."""
        self.begun, self._done, self._iterator = begun, 0, None

    def close(self) -> None:
        """End the worker processes, and abandon the open pass."""
        self._iterator = None
        self._source.close()


def training_source(loader: Iterable[Any], settings: RankSettings, place: RankPlace) -> Source:
    """Return a source with this rank's shard of the loader, or with the whole loader if it is not to be sharded.

    A loader is sharded if `num_workers` is above 1, `add_dist_sampler` is set, and its sampler is one of torch's. The
    last batches are filled up, so that all ranks have equally many samples.
    """
    return _source("train_loader", loader, settings, place, exact=False)


def validation_source(loader: Iterable[Any], settings: RankSettings, place: RankPlace) -> Source:
    """Return a source as `training_source` does, but repeat samples only if ranks would have fewer batches than others.

    So a sample is evaluated twice only if ranks could not have equally many batches otherwise.
    """
    return _source("validation_loader", loader, settings, place, exact=True)


def _source(name: str, loader: Iterable[Any], settings: RankSettings, place: RankPlace, *, exact: bool) -> Source:
    if settings.num_workers == 1 or not settings.add_dist_sampler or not _is_to_be_shared(loader):
        return ReplayedLoader(loader)
    if takes_any_order(loader):
        return Shards(loader, place, exact=exact)
    if place.rank == 0:
        warnings.warn(
            f"register_data: {name} has {_peculiarity(loader)} and is not sharded: every rank iterates over all of "
            f"it. Make it give each rank its share (self.world_rank of self.world_size), or use one of torch's "
            f"samplers; add_dist_sampler=False turns this warning off",
            stacklevel=2,
        )
    return ReplayedLoader(loader)


def _is_to_be_shared(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Return whether the loader is a DataLoader over a map-style dataset that the user has not sharded already."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(order_of(loader), DistributedSampler)
    )


def _peculiarity(loader: DataLoader[Any]) -> str:
    """Return a phrase for messages: the reason why `takes_any_order` is false for the loader."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"a custom __iter__ ({type(loader).__name__})"
    batches = loader.batch_sampler
    sampler = order_of(loader) if batches is None or type(batches) is BatchSampler else batches
    return f"a custom sampler ({type(sampler).__name__})"
