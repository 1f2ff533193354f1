"""One rank's batches: passes over its data that go on from call to call, and where a snapshot left them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeGuard

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from hpc_det.pytorch.data.external_loader import ReplayedLoader
from hpc_det.sgd.place import Place, Settings
from hpc_det.sgd.rank.data.passes import Passes, Source
from hpc_det.sgd.rank.data.shards import Shards, order_of, takes_any_order

__all__ = ["Passes", "training_source", "validation_source"]


def training_source(loader: Iterable[Any], settings: Settings, place: Place) -> Source:
    """Shared out where several ranks may train and the loader lets us; as the user made it otherwise."""
    return _source("train_loader", loader, settings, place, exact=False)


def validation_source(loader: Iterable[Any], settings: Settings, place: Place) -> Source:
    """The same; where ranks get equally many batches without it, no sample is evaluated twice to fill them up."""
    return _source("validation_loader", loader, settings, place, exact=True)


def _source(name: str, loader: Iterable[Any], settings: Settings, place: Place, *, exact: bool) -> Source:
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
