"""Batch samplers: which items this rank gets in each batch, looked up some thousand at a time.

Each yields (key, items). The key names the batch in the whole of training, or of a validation, for its random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, count, islice
from typing import Any

import numpy as np

from hpc_det.pytorch.data.order import Items, Numbers
from hpc_det.pytorch.data.partition import Position, Share, Stretch

BLOCK = 8192
"""Items that are looked up at once, which takes less than a millisecond: numpy's cost per call disappears in it."""

Key = tuple[int, int]
KeyedBatch = tuple[Key, list[Any]]


class TrainingBatches:
    """This rank's batches from `position` on, without end. Key: the position, as (epoch, done)."""

    def __init__(self, share: Share, *, rank: int, position: Position) -> None:
        self._share = share
        self._rank = rank
        self._position = position

    def __len__(self) -> int:
        """Of one epoch."""
        return self._share.batches_per_epoch(self._share.items.nominal_length)

    def __iter__(self) -> Iterator[KeyedBatch]:
        position = self._position
        while True:
            batches = min(self._share.whole_batches(position), _at_once(self._share.per_slot))
            if batches:
                keys = ((position.epoch, done) for done in count(position.done, self._share.whole))
                yield from zip(keys, self._whole(position, batches), strict=False)
                position = self._share.after_whole(position, batches)
            else:
                yield (position.epoch, position.done), self._other(self._share.stretches(position))
                position = self._share.after(position)

    def _whole(self, position: Position, batches: int) -> list[list[Any]]:
        first = position.done + self._rank * self._share.per_slot
        firsts = np.arange(batches) * self._share.whole + first
        return _rows(self._share.items, position.epoch, firsts, self._share.per_slot)

    def _other(self, stretches: list[Stretch]) -> list[Any]:
        """Of a batch that is not whole, or of two epochs."""
        parts = self._share.part(self._rank, stretches)
        rows = (_rows(self._share.items, epoch, np.array([first]), end - first) for epoch, first, end in parts)
        return [item for (row,) in rows for item in row]


class OnePass:
    """Every `size`-th batch of epoch 0, from the `rank`-th on: over all ranks every item once. Key: (0, number)."""

    def __init__(
        self, items: Items, *, per_slot: int, rank: int, size: int, skip: int = 0, drop_last: bool = False
    ) -> None:
        """`skip`: batches that each rank leaves out at the start."""
        self._items = items
        self._per_slot = per_slot
        self._size = size
        self._begin = rank + skip * size
        self._drop_last = drop_last

    def __len__(self) -> int:
        return len(self._numbers(self._items.nominal_length))

    def __iter__(self) -> Iterator[KeyedBatch]:
        length = self._items.length(0)
        whole = self._numbers(length - length % self._per_slot)
        for begin in range(0, len(whole), _at_once(self._per_slot)):
            some = whole[begin : begin + _at_once(self._per_slot)]
            firsts = np.arange(some.start, some.stop, some.step) * self._per_slot
            yield from zip(((0, number) for number in some), _rows(self._items, 0, firsts, self._per_slot), strict=True)
        for number in self._numbers(length)[len(whole) :]:  # the last one, if it is a short one
            first = number * self._per_slot
            yield (0, number), _rows(self._items, 0, np.array([first]), length - first)[0]

    def _numbers(self, length: int) -> range:
        batches = length // self._per_slot if self._drop_last else -(-length // self._per_slot)
        return range(self._begin, batches, self._size)


class SoMany:
    """So many batches of `own`, and where these are too few, the first ones of `more`."""

    def __init__(self, own: OnePass, more: OnePass, number: int) -> None:
        self._batches = own, more
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[KeyedBatch]:
        return islice(chain.from_iterable(self._batches), self._number)


IndexBatches = TrainingBatches | OnePass | SoMany


class ForTorch:
    """As the batch sampler of a torch DataLoader."""

    def __init__(self, batches: IndexBatches, *, keyed: bool, items_are_batches: bool) -> None:
        """`keyed`: with the keys; `items_are_batches`: each batch has one item, which is what the dataset is asked."""
        self._batches = batches
        self._keyed = keyed
        self._items_are_batches = items_are_batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for key, items in self._batches:
            indices = items[0] if self._items_are_batches else items
            yield (key, indices) if self._keyed else indices


def _at_once(per_slot: int) -> int:
    return max(BLOCK // per_slot, 1)


def _rows(items: Items, epoch: int, firsts: Numbers, width: int) -> list[list[Any]]:
    """The `width` items from each of `firsts` on."""
    return items.rows(epoch, firsts[:, None] + np.arange(width))
