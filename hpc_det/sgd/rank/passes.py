"""One rank's batches: passes over its data that go on from call to call, and where a snapshot left them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from hpc_det.pytorch.data.external_loader import ReplayedLoader
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.shards import Shards, order_of, takes_any_order


class Source(Protocol):
    """What passes are made over."""

    counts: ClassVar[str]
    """What `done` is a number of: samples of all ranks, or batches of this one."""
    generators: list[torch.Generator]
    """The user's, which are neither torch's nor numpy's global ones."""

    def begin(self, epoch: int) -> Iterator[Any]:
        """A pass, the `epoch`-th counted from 0."""
        ...

    def resume(self, epoch: int, done: int, began: dict[str, Any] | None) -> Iterator[Any]:
        """The rest of a pass that began as `began` says; None on a rank that did not exist then."""
        ...

    def began(self) -> dict[str, Any]:
        """What the open pass needs to be resumed, besides its number and `done`; for torch.save."""
        ...

    def after(self, done: int) -> int:
        """`done` after one more batch."""
        ...

    def left(self, done: int) -> int | None:
        """Batches of the pass that are left; None where only the end of the iterator tells."""
        ...

    def close(self) -> None:
        """Ends worker processes."""
        ...


class SizedBatches:
    """Batches whose number is known, for a bar over them."""

    def __init__(self, batches: Iterator[Any], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        """Of all."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __next__(self) -> Any:
        return next(self._batches)


class Passes:
    """Over what `source_of` makes of the user's loader; over nothing until there is one."""

    def __init__(self, source_of: Callable[[Iterable[Any]], Source]) -> None:
        self.begun = 0
        """Passes that have begun: RaySGD's `epoch`."""
        self._source_of = source_of
        self._loader: Iterable[Any] = ()
        self._source: Source = ReplayedLoader(())
        self._iterator: Iterator[Any] | None = None
        self._done = 0
        self.drawn = 0
        """Batches, ever: whether anything moves."""

    @property
    def finished(self) -> int:
        """Passes that are over. An empty one is over at once; the end of one without a length is seen when it comes."""
        return self.begun - self._is_open

    def over(self, loader: Iterable[Any]) -> Passes:
        """These, over the loader of before or over a new one, whose passes begin anew."""
        if loader is not self._loader:
            self.close()
            self._loader, self._source = loader, self._source_of(loader)
        return self

    def batches(self, num_steps: int | None) -> Iterator[Any]:
        """The next `num_steps` batches, of as many passes as that takes; None: what is left of the pass.

        Where nothing is left, a pass begins. An empty pass is the end. Has a len() where the number is known.
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
            if given != num_steps or not self._is_open:  # it came to its end
                self._iterator = None
            is_empty = given == before
            if (is_empty and is_new) or (num_steps is None and not is_empty):
                return

    def _open(self) -> bool:
        """Whether a pass begins with that."""
        if self._is_open:
            return False
        self._iterator, self._done = self._source.begin(self.begun), 0
        self.begun += 1
        return True

    def _rest(self, most: int | None) -> Iterator[Any]:
        assert self._iterator is not None
        for batch in islice(self._iterator, most):
            self.drawn += 1
            self._done = self._source.after(self._done)  # before its use: a caller that breaks off never comes back
            yield batch

    @property
    def _is_open(self) -> bool:
        return self._iterator is not None and self._source.left(self._done) != 0

    # --- snapshots

    def position(self) -> dict[str, Any]:
        """Of the gang, as far as its ranks are in step. Of a pass that is over nothing is left."""
        return {
            "begun": self.begun,
            "done": self._done if self._is_open else 0,
            "counts": self._source.counts,
            "is_open": self._is_open,
        }

    def own(self) -> dict[str, Any]:
        """Of this rank, to be taken with `position`."""
        return {
            "position": self.position(),
            "began": self._source.began() if self._is_open else None,
            "generators": [generator.get_state() for generator in self._source.generators],
        }

    def restore(self, position: dict[str, Any], own: dict[str, Any] | None) -> None:
        """To be called after `over`. `own`: None on a rank that did not exist then; it goes on as rank 0 does.

        A pass over data that were counted otherwise, as with one worker for several, begins once more.
        """
        if own:
            position = own["position"]
        self.restart(position["begun"])
        if not position["is_open"]:
            return
        if position["counts"] != self._source.counts:
            self.begun -= 1
            return
        self._done = position["done"]
        self._iterator = self._source.resume(self.begun - 1, self._done, own["began"] if own else None)

    def restore_generators(self, own: dict[str, Any]) -> None:
        """The user's own. After all of `restore`: loaders may have one in common."""
        for generator, state in zip(self._source.generators, own["generators"], strict=False):
            generator.set_state(state)

    def restart(self, begun: int) -> None:
        """After so many passes, at the begin of the next."""
        self.begun, self._done, self._iterator = begun, 0, None

    def close(self) -> None:
        """Ends worker processes, and the open pass."""
        self._iterator = None
        self._source.close()


def training_source(loader: Iterable[Any], settings: RankSettings, place: RankPlace) -> Source:
    """Shared out where several ranks may train and the loader lets us; as the user made it otherwise."""
    return _source("train_loader", loader, settings, place, exact=False)


def validation_source(loader: Iterable[Any], settings: RankSettings, place: RankPlace) -> Source:
    """The same; where ranks get equally many batches without it, no sample is evaluated twice to fill them up."""
    return _source("validation_loader", loader, settings, place, exact=True)


def _source(name: str, loader: Iterable[Any], settings: RankSettings, place: RankPlace, *, exact: bool) -> Source:
    if settings.num_workers == 1 or not settings.add_dist_sampler or not _is_to_be_shared(loader):
        return ReplayedLoader(loader)
    if takes_any_order(loader):
        return Shards(loader, place, exact=exact)
    if place.rank == 0:
        warnings.warn(
            f"register_data: {name} has {_peculiarity(loader)}, which stays as it is: every rank iterates it by "
            f"itself. Let it give each rank its share (self.world_rank of self.world_size), or use one of torch's "
            f"samplers; add_dist_sampler=False says that this is meant",
            stacklevel=2,
        )
    return ReplayedLoader(loader)


def _is_to_be_shared(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    """Not data without numbers, nor what shares out by itself."""
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not isinstance(order_of(loader), DistributedSampler)
    )


def _peculiarity(loader: DataLoader[Any]) -> str:
    """What keeps `takes_any_order` from being true."""
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"an __iter__ of its own ({type(loader).__name__})"
    batches = loader.batch_sampler
    sampler = order_of(loader) if batches is None or type(batches) is BatchSampler else batches
    return f"a sampler of its own ({type(sampler).__name__})"
