"""A DataLoader whose passes are sharded over the ranks, and can be resumed at any sample with any number of ranks.

A pass has the order of torch.utils.data.DistributedSampler in the same epoch with its default seed, 0, and each rank
gets the samples that DistributedSampler gives it: every n-th one with n ranks. A resumed pass distributes the samples
after its position in the same way over the ranks that exist then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, ClassVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hpc_det.core.external_loader import generators_of
from hpc_det.core.loader_workers import WorkerInit
from hpc_det.distributed.rng import mixed_seed
from hpc_det.pytorch.data.partition import KeyedBatch
from hpc_det.pytorch.data.workers import rank_loader
from hpc_det.sgd.rank import RankPlace

BLIND = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers whose order depends only on their generator, not on the rank. Subclasses do not count: they may differ."""


def order_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that orders the samples; for a custom batch sampler without a sampler, the batch sampler."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else getattr(batches, "sampler", batches)


def takes_any_order(loader: DataLoader[Any]) -> bool:
    """Return whether the loader can be sharded by replacing its sampler: its iteration and samplers are torch's own."""
    has_plain_batches = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    is_plain = type(loader).__iter__ is DataLoader.__iter__
    return is_plain and has_plain_batches and type(order_of(loader)) in BLIND


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The division of the samples that are left in a pass (`left`) into batches, equally many on each rank."""

    rank: int
    size: int
    """Number of ranks."""
    per_batch: int
    """Samples in a batch of one rank."""
    drops_last: bool
    """Whether an incomplete last batch of a rank is dropped."""
    exact: bool
    """Whether some ranks may have one sample less than others, as long as all have equally many batches."""

    @property
    def whole(self) -> int:
        """Samples in the batches of all ranks together."""
        return self.size * self.per_batch

    def batches(self, left: int) -> int:
        """Return the number of batches of each rank."""
        return self._batches_of(-(-left // self.size))

    def samples(self, left: int) -> int:
        """Return the number of samples of this rank, including samples that are repeated to fill up batches."""
        fewest, one_more = divmod(left, self.size)
        if self.exact and self._batches_of(fewest) == self.batches(left):
            return fewest + (self.rank < one_more)
        return -(-left // self.size)

    def _batches_of(self, samples: int) -> int:
        """Return the number of batches that these samples of one rank make."""
        return samples // self.per_batch if self.drops_last else -(-samples // self.per_batch)


class ShardBatches:
    """A batch sampler for this rank's batches of one pass, from a given sample on.

    It yields pairs of a key and the indices of a batch. The key, from which loader workers seed their random numbers,
    is the seed of the pass and the position of the first sample that any rank has in this batch.
    """

    def __init__(self, sampler: Any, cut: Cut) -> None:
        self._sampler = sampler
        self._cut = cut
        self._epoch = self._first = self._seed = 0

    def turn_to(self, epoch: int, first: int, seed: int) -> None:
        """Select the pass (`epoch`, `seed`) and the first sample of the next iterator."""
        self._epoch, self._first, self._seed = epoch, first, seed

    @property
    def samples(self) -> int:
        """The number of samples in a pass, over all ranks."""
        return len(self._sampler)

    def __len__(self) -> int:
        return self._cut.batches(max(self.samples - self._first, 0))

    def __iter__(self) -> Iterator[KeyedBatch]:
        cut, seed, first, batches = self._cut, self._seed, self._first, len(self)
        own = self._own() if batches else []
        for k in range(batches):
            yield (seed, first + k * cut.whole), own[k * cut.per_batch : (k + 1) * cut.per_batch]

    def _own(self) -> list[Any]:
        """Return the indices of this rank's samples, from the first sample of the iterator on."""
        # As in DistributedSampler, missing samples are repeated from the start of the order.
        order, cut = _drawn(self._sampler, self._epoch), self._cut
        filled = chain(order[self._first :], cycle(order))
        return list(islice(filled, cut.rank, cut.samples(len(order) - self._first) * cut.size, cut.size))


class Shards:
    """This rank's shards of a loader: the loader is rebuilt with the same options and another order of samples."""

    counts: ClassVar[str] = "samples"

    def __init__(self, loader: DataLoader[Any], place: RankPlace, *, exact: bool) -> None:
        batches = loader.batch_sampler
        self._cut = Cut(
            rank=place.rank,
            size=place.size,
            per_batch=batches.batch_size if isinstance(batches, BatchSampler) else 1,
            drops_last=isinstance(batches, BatchSampler) and batches.drop_last,
            exact=exact,
        )
        self._batches = ShardBatches(order_of(loader), self._cut)
        self._rank = place.rank
        self._generator = loader.generator
        self.generators = generators_of(loader)
        self._seed = 0
        self._loader = rank_loader(loader.dataset, self._batches, place.rank, **_options(loader))

    def begin(self, epoch: int) -> Iterator[Any]:
        # torch's DataLoader draws this number too when an iteration begins, as the seed of its workers. Drawing it
        # here leaves the generators in the state that a plain loop over the loader leaves them in.
        seed = torch.empty((), dtype=torch.int64).random_(generator=self._generator).item()
        return self._iterator(epoch, 0, int(seed))

    def resume(self, epoch: int, done: int, began: dict[str, Any] | None) -> Iterator[Any]:
        # A rank that did not exist at the snapshot has no seed of the pass; >> 1 makes it fit a signed 64-bit integer.
        seed = began["seed"] if began else mixed_seed("pass", epoch) >> 1
        return self._iterator(epoch, done, seed)

    def _iterator(self, epoch: int, done: int, seed: int) -> Iterator[Any]:
        self._seed = seed
        self._loader.generator.manual_seed(mixed_seed("loader processes", self._rank, seed))
        self._batches.turn_to(epoch, done, seed)
        return iter(self._loader)

    def began(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def finish(self) -> None:
        """Do nothing: the user's generators are drawn from at the beginning of a pass only."""

    def after(self, done: int) -> int:
        return done + self._cut.whole

    def left(self, done: int) -> int:
        return self._cut.batches(max(self._batches.samples - done, 0))

    def close(self) -> None:
        self._loader.close()


class _OneSample:
    """The collate function for a loader with batch_size=None: it passes the only sample to the user's function."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate_fn(samples[0])


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments that the user's loader was made with, except the order and size of batches."""
    collate_fn = loader.collate_fn
    return {
        "num_workers": loader.num_workers,
        "collate_fn": _OneSample(collate_fn) if loader.batch_sampler is None else collate_fn,
        "pin_memory": loader.pin_memory,
        "pin_memory_device": loader.pin_memory_device,
        "timeout": loader.timeout,
        "worker_init_fn": WorkerInit(loader.worker_init_fn),
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "in_order": loader.in_order,
    }


def _drawn(sampler: Any, epoch: int) -> list[Any]:
    """Return the sampler's order of the samples in an epoch, the same on all ranks.

    `sampler`: an instance of a class in `BLIND`, whose own generator is not used.
    """
    if not hasattr(sampler, "generator"):
        return list(sampler)
    # DistributedSampler seeds with seed + epoch, and its seed is 0.
    own, sampler.generator = sampler.generator, torch.Generator().manual_seed(epoch)
    try:
        return list(sampler)
    finally:
        sampler.generator = own
