"""Samplers for data sets that shard, repeat and skip themselves, without `hpc_det.pytorch.DataLoader`.

Combine them in this order: shuffle, repeat, shard, batch, skip. Repeat after shuffling, because a shuffle reads its
input to the end. Shard after repeating, because otherwise ranks end their epochs at different batches. Skip last, so
that it happens once and not in every epoch. Names, arguments and orders are those of `determined.pytorch.samplers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Sampler

T = TypeVar("T")
Batch = list[int]


class _Around(Sampler[T]):
    """A sampler that wraps another sampler, or any iterable that can be iterated repeatedly and has a length."""

    def __init__(self, sampler: Iterable[T]) -> None:
        self._sampler: Any = sampler

    def __len__(self) -> int:
        return len(self._sampler)


class RepeatSampler(_Around[T]):
    """Repeats the sampler endlessly; an empty one ends at once. Its length is that of one epoch."""

    def __iter__(self) -> Iterator[T]:
        empty = False  # an empty sampler would otherwise loop forever without yielding
        while not empty:
            empty = True
            for item in self._sampler:
                empty = False
                yield item


class RepeatBatchSampler(RepeatSampler[Batch]):
    """RepeatSampler for a sampler of batches (lists of indices)."""

    def __init__(self, batch_sampler: Iterable[Batch]) -> None:
        super().__init__(batch_sampler)


class DistributedSampler(_Around[T]):
    """The items of one rank: the items rank, rank + num_workers, rank + 2 * num_workers, ... of the sampler.

    `num_workers` is the number of ranks. Raises ValueError if `rank` is not below it.
    """

    def __init__(self, sampler: Iterable[T], num_workers: int, rank: int) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; it is the number of ranks, at least 1")
        if not 0 <= rank < num_workers:
            raise ValueError(f"rank is {rank} with num_workers {num_workers}; ranks are 0 to num_workers - 1")
        super().__init__(sampler)
        self._num_workers = num_workers
        self._rank = rank

    def __len__(self) -> int:
        return len(range(self._rank, len(self._sampler), self._num_workers))

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._sampler), self._rank, None, self._num_workers)


class DistributedBatchSampler(DistributedSampler[Batch]):
    """DistributedSampler for batches."""

    def __init__(self, batch_sampler: Iterable[Batch], num_workers: int, rank: int) -> None:
        super().__init__(batch_sampler, num_workers, rank)


class SkipSampler(_Around[T]):
    """Skips the first `skip` items in each iteration. Its length includes the skipped items."""

    def __init__(self, sampler: Iterable[T], skip: int) -> None:
        super().__init__(sampler)
        self._skip = skip

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._sampler), self._skip, None)


class SkipBatchSampler(SkipSampler[Batch]):
    """SkipSampler for batches. Prefer it to SkipSampler, because training is counted in batches."""

    def __init__(self, batch_sampler: Iterable[Batch], skip: int) -> None:
        super().__init__(batch_sampler, skip)


class ReproducibleShuffleSampler(_Around[T]):
    """Shuffles again in each iteration. All orders follow from `seed`, 0 to 2**32 - 1.

    In each iteration, the same `numpy.random.RandomState(seed)` shuffles the items from the sampler's order.
    """

    def __init__(self, sampler: Iterable[T], seed: int) -> None:
        super().__init__(sampler)
        self._random = np.random.RandomState(seed)

    def __iter__(self) -> Iterator[T]:
        sampled = list(self._sampler)
        order = np.arange(len(sampled))
        self._random.shuffle(order)  # the same swaps as on a list, but many times faster
        return iter([sampled[place] for place in order.tolist()])


class ReproducibleShuffleBatchSampler(ReproducibleShuffleSampler[Batch]):
    """ReproducibleShuffleSampler for batches. Prefer to shuffle records, which mixes them better."""

    def __init__(self, batch_sampler: Iterable[Batch], seed: int) -> None:
        super().__init__(batch_sampler, seed)


def adapt_batch_sampler(
    batch_sampler: Iterable[Batch], repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0
) -> Iterable[Batch]:
    """Return the batch sampler with the needed wrappers: repeated, then sharded over the ranks, then skipped.

    `skip`: batches of one rank. Raises ValueError if `rank` is not below `num_replicas`.
    """
    if repeat:
        batch_sampler = RepeatBatchSampler(batch_sampler)
    if num_replicas > 1:
        batch_sampler = DistributedBatchSampler(batch_sampler, num_replicas, rank)
    return SkipBatchSampler(batch_sampler, skip) if skip > 0 else batch_sampler
