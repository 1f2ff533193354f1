"""The partition of an epoch's items into global batches, and of these into the shares of ranks.

A position counts items, not batches, so that a run that resumes, also on another number of ranks, continues at the
right item: none is repeated or skipped.

IndexBatches (TrainingBatches, OnePass, SoMany) are batch samplers: they yield the items of this rank in each batch,
looked up a few thousand at a time, as (key, items). The key identifies the batch in the whole training or validation;
its random numbers depend on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from enum import Enum
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np

from hpc_det.core.progress import Position
from hpc_det.errors import UsageError, count, length_in_words
from hpc_det.pytorch.data.order import Items, Numbers

BLOCK = 8192
"""Items looked up at once. This takes less than a millisecond, and numpy's cost per call becomes negligible."""

Key = tuple[int, int]
KeyedBatch = tuple[Key, list[Any]]


class Rest(Enum):
    """The use of items at the end of an epoch that do not fill a whole global batch."""

    SHORT = "a shorter batch"
    """If there are fewer than ranks, they join the previous batch."""
    DROPPED = "no batch"
    FILLED = "a batch with the first items of the next epoch"


Stretch = tuple[int, int, int]
"""(epoch, first, end): items first .. end-1 of that epoch."""


class Share:
    """The partition of a training set for `size` ranks.

    If the items left in an epoch are too few for a batch and the previous batch is done already, as can happen after a
    resume on more ranks, they are filled up from the next epoch, whatever `rest` is. So no batch ends two epochs.
    """

    def __init__(self, items: Items, *, per_slot: int, size: int, rest: Rest) -> None:
        """`per_slot`: items of one rank in a whole batch."""
        self.items = items
        self.per_slot = per_slot
        self.size = size
        self.rest = rest
        self.whole = per_slot * size
        """Items in a whole global batch."""
        self.least = size if rest is Rest.SHORT else self.whole
        """Items in the smallest global batch, and therefore in the smallest epoch."""
        self._one_more = {Rest.SHORT: size, Rest.DROPPED: self.whole, Rest.FILLED: 1}[rest]
        """The smallest number of items left at the end of an epoch that make up one more batch."""
        self._epoch = -1
        self._last_plain = 0
        """Largest end of a batch in `_epoch` after which the epoch has a further batch; see `after`."""

    def after(self, position: Position) -> Position:
        """Return the position after the global batch at `position`."""
        # Called for every batch: within an epoch the length is not looked up again.
        end = position.done + self.whole
        if position.epoch != self._epoch:
            self._epoch = position.epoch
            self._last_plain = self._length(position.epoch) - self._one_more
        if end <= self._last_plain:
            return Position(position.epoch, end)
        epoch, _, end = self.stretches(position)[-1]
        return self._at(epoch, end) if epoch == position.epoch else Position(epoch, end)

    def stretches(self, position: Position) -> list[Stretch]:
        """Return the items of the global batch at `position`."""
        epoch, done = position.epoch, position.done
        length = self._length(epoch)
        if length - done < self.least:
            # One less than the next epoch has: the batch must not end that epoch, too.
            taken = min(self.whole - (length - done), self._length(epoch + 1) - 1)
            return [(epoch, done, length), (epoch + 1, 0, taken)]
        end = min(done + self.whole, length)
        if self.rest is Rest.SHORT and length - end < self.size:
            end = length
        return [(epoch, done, end)]

    def whole_batches(self, position: Position) -> int:
        """Return the number of whole global batches from `position` on within its epoch."""
        full, left = divmod(self._length(position.epoch) - position.done, self.whole)
        joined = self.rest is Rest.SHORT and 0 < left < self.size  # the last whole batch takes the rest
        return max(full - joined, 0)

    def after_whole(self, position: Position, batches: int) -> Position:
        """Return the position after `batches` of the `whole_batches`."""
        return self._at(position.epoch, position.done + batches * self.whole)

    def batches_per_epoch(self, length: int) -> int:
        """Return the number of global batches of an epoch of `length` items."""
        full, left = divmod(length, self.whole)
        return full + (left >= self._one_more)

    def part(self, rank: int, stretches: list[Stretch]) -> list[Stretch]:
        """Return the contiguous part of one rank; if it does not divide evenly, the first ranks have one item more."""
        each, more = divmod(sum(end - first for _, first, end in stretches), self.size)
        begin = rank * each + min(rank, more)
        return _between(stretches, begin, begin + each + (rank < more))

    def of_same_size(self) -> Share:
        """Return this partition with batches of one size only. Raises UsageError if an epoch ends with another size."""
        if self.rest is not Rest.SHORT:
            return self
        length = self.items.nominal_length
        if left := length % self.whole:
            raise UsageError(
                f"build_training_data_loader: {length} {self.items.name} make micro batches of {self.per_slot} per "
                f"slot on {count(self.size, 'slot')}, which leaves {left} for one of another size, but a pipeline "
                "takes one size only; use drop_last=True"
            )
        # FILLED, because after a resume on another number of slots epochs no longer end with a whole batch.
        return Share(self.items, per_slot=self.per_slot, size=self.size, rest=Rest.FILLED)

    def check(self, length: int) -> None:
        """Raise UsageError if an epoch of `length` items makes no batch."""
        if length >= self.least:
            return
        name = self.items.name
        if not length:
            raise UsageError(f"build_training_data_loader: there are no {name}; training needs at least one per slot")
        fewer = " or drop_last=False" if self.rest is Rest.DROPPED and length >= self.size else ""
        raise UsageError(
            f"build_training_data_loader: {length_in_words(length, name)} cannot make one batch of {self.per_slot} per "
            f"slot on {count(self.size, 'slot')}; use fewer slots{fewer}"
        )

    def _length(self, epoch: int) -> int:
        length = self.items.length(epoch)
        self.check(length)
        return length

    def _at(self, epoch: int, end: int) -> Position:
        """Return the position after `end` items of the epoch; if they leave no batch, the next epoch's beginning."""
        left = self._length(epoch) - end
        over = left < self.whole if self.rest is Rest.DROPPED else not left
        return Position(epoch + 1) if over else Position(epoch, end)


def _between(stretches: list[Stretch], begin: int, end: int) -> list[Stretch]:
    """Return items `begin` to `end` - 1 of the concatenated stretches."""
    found = []
    for epoch, first, last in stretches:
        low, high = max(first + begin, first), min(first + end, last)
        if low < high:
            found.append((epoch, low, high))
        begin, end = begin - (last - first), end - (last - first)
    return found


class IndexBatches(Protocol):
    """A batch sampler of one rank that yields each batch of item indices together with its key."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KeyedBatch]: ...


class TrainingBatches:
    """This rank's batches from `position` on, endlessly. The key is the position, as (epoch, done)."""

    def __init__(self, share: Share, *, rank: int, position: Position) -> None:
        self._share = share
        self._rank = rank
        self._position = position

    def __len__(self) -> int:
        """Return the batches per epoch."""
        return self._share.batches_per_epoch(self._share.items.nominal_length)

    def __iter__(self) -> Iterator[KeyedBatch]:
        position = self._position
        while True:
            batches = min(self._share.whole_batches(position), _at_once(self._share.per_slot))
            if batches:
                keys = ((position.epoch, done) for done in itertools.count(position.done, self._share.whole))
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
        """Return this rank's items of a batch that is not whole, or spans two epochs."""
        parts = self._share.part(self._rank, stretches)
        rows = (_rows(self._share.items, epoch, np.array([first]), end - first) for epoch, first, end in parts)
        return [item for (row,) in rows for item in row]


class OnePass:
    """Every `size`-th batch of epoch 0 from batch `rank` on; all ranks together yield each item once.

    The key is (0, number of the batch).
    """

    def __init__(
        self, items: Items, *, per_slot: int, rank: int, size: int, skip: int = 0, drop_last: bool = False
    ) -> None:
        """`skip`: batches that each rank skips at the start."""
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
        for number in self._numbers(length)[len(whole) :]:  # the last batch, if it is shorter
            first = number * self._per_slot
            yield (0, number), _rows(self._items, 0, np.array([first]), length - first)[0]

    def _numbers(self, length: int) -> range:
        batches = length // self._per_slot if self._drop_last else -(-length // self._per_slot)
        return range(self._begin, batches, self._size)


class SoMany:
    """Exactly `number` batches: the first ones of `own`, continued with those of `more` if `own` has fewer."""

    def __init__(self, own: OnePass, more: OnePass, number: int) -> None:
        self._batches = own, more
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[KeyedBatch]:
        return islice(chain.from_iterable(self._batches), self._number)


class ForTorch:
    """IndexBatches in the form of a batch sampler for torch's DataLoader."""

    def __init__(self, batches: IndexBatches, *, keyed: bool, items_are_batches: bool) -> None:
        """`keyed`: yield the keys, too; `items_are_batches`: a batch is one item, which the data set receives alone."""
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
    """Return, for each of `firsts`, the `width` items from there on."""
    return items.rows(epoch, firsts[:, None] + np.arange(width))
