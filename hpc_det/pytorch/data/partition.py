"""How the items of an epoch are cut into global batches, and those into the shares of ranks.

The position counts items, not batches, so that a resume, also on another number of ranks, goes on at the right one:
nothing twice, nothing left out.

IndexBatches (TrainingBatches, OnePass, SoMany) are batch samplers: which items this rank gets in each batch, looked up
some thousand at a time. Each yields (key, items). The key names the batch in the whole of training, or of a validation,
for its random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count, islice
from typing import Any, Protocol

import numpy as np

from hpc_det.errors import UsageError
from hpc_det.pytorch.data.order import Items, Numbers

BLOCK = 8192
"""Items that are looked up at once, which takes less than a millisecond: numpy's cost per call disappears in it."""

Key = tuple[int, int]
KeyedBatch = tuple[Key, list[Any]]


@dataclass(frozen=True, slots=True)
class Position:
    """Where training is: `done` items of epoch `epoch` are done, all epochs before it are over.

    An item is a record; with a batch sampler or a loader of the user's own it is a batch.
    """

    epoch: int = 0
    done: int = 0


class Rest(Enum):
    """What becomes of the items at the end of an epoch that do not make a whole global batch."""

    SHORT = "a shorter batch"
    """Too few to give each rank one go with the batch before them."""
    DROPPED = "no batch"
    FILLED = "a batch with the first items of the next epoch"


Stretch = tuple[int, int, int]
"""(epoch, first, end): items first .. end-1 of that epoch."""


class Share:
    """The cut of a training set for `size` ranks.

    Where too few are left of an epoch for a batch of their own and the batch before them is done already, as after a
    resume on more ranks, they are filled up from the next epoch, whatever the rule. So no batch ends two epochs.
    """

    def __init__(self, items: Items, *, per_slot: int, size: int, rest: Rest) -> None:
        """`per_slot`: items of one rank in a whole batch."""
        self.items = items
        self.per_slot = per_slot
        self.size = size
        self.rest = rest
        self.whole = per_slot * size
        """Items of a whole global batch."""
        self.least = size if rest is Rest.SHORT else self.whole
        """Items of the smallest global batch, so also of the smallest epoch."""
        self._one_more = {Rest.SHORT: size, Rest.DROPPED: self.whole, Rest.FILLED: 1}[rest]
        """So many items left at the end of an epoch make for one more batch."""
        self._epoch = -1
        self._last_plain = 0

    def after(self, position: Position) -> Position:
        """Where training is after the global batch at `position`."""
        end = position.done + self.whole
        if position.epoch != self._epoch:
            self._epoch = position.epoch
            self._last_plain = self._length(position.epoch) - self._one_more
        if end <= self._last_plain:
            return Position(position.epoch, end)
        epoch, _, end = self.stretches(position)[-1]
        return self._at(epoch, end) if epoch == position.epoch else Position(epoch, end)

    def stretches(self, position: Position) -> list[Stretch]:
        """The items of the global batch at `position`."""
        epoch, done = position.epoch, position.done
        length = self._length(epoch)
        if length - done < self.least:
            taken = min(self.whole - (length - done), self._length(epoch + 1) - 1)
            return [(epoch, done, length), (epoch + 1, 0, taken)]
        end = min(done + self.whole, length)
        if self.rest is Rest.SHORT and length - end < self.size:
            end = length
        return [(epoch, done, end)]

    def whole_batches(self, position: Position) -> int:
        """How many global batches from `position` on are whole and of one epoch."""
        full, left = divmod(self._length(position.epoch) - position.done, self.whole)
        joined = self.rest is Rest.SHORT and 0 < left < self.size
        return max(full - joined, 0)

    def after_whole(self, position: Position, batches: int) -> Position:
        """After so many of `whole_batches`."""
        return self._at(position.epoch, position.done + batches * self.whole)

    def batches_per_epoch(self, length: int) -> int:
        full, left = divmod(length, self.whole)
        return full + (left >= self._one_more)

    def part(self, rank: int, stretches: list[Stretch]) -> list[Stretch]:
        """The contiguous part of one rank; the first ranks have one item more where they do not come out even."""
        each, more = divmod(sum(end - first for _, first, end in stretches), self.size)
        begin = rank * each + min(rank, more)
        return _between(stretches, begin, begin + each + (rank < more))

    def of_same_size(self) -> Share:
        """The same for batches of one size alone. Raises UsageError where an epoch ends with one of another size."""
        if self.rest is not Rest.SHORT:
            return self
        length = self.items.nominal_length
        if left := length % self.whole:
            raise UsageError(
                f"build_training_data_loader: {length} {self.items.name} make micro batches of {self.per_slot} per "
                f"slot on {self.size} slots, which leaves {left} for one of another size, and a pipeline takes one "
                f"size only; use drop_last=True"
            )
        # After a resume on other slots epochs do not come out even any more.
        return Share(self.items, per_slot=self.per_slot, size=self.size, rest=Rest.FILLED)

    def check(self, length: int) -> None:
        """Raises UsageError for a `length` of an epoch that makes no batch."""
        if length >= self.least:
            return
        name = self.items.name
        if not length:
            raise UsageError(f"build_training_data_loader: there are no {name}; training needs at least one per slot")
        fewer = " or drop_last=False" if self.rest is Rest.DROPPED and length >= self.size else ""
        raise UsageError(
            f"build_training_data_loader: {length} {name} do not make one batch of {self.per_slot} per slot "
            f"on {self.size} slots; use fewer slots{fewer}"
        )

    def _length(self, epoch: int) -> int:
        length = self.items.length(epoch)
        self.check(length)
        return length

    def _at(self, epoch: int, end: int) -> Position:
        """`end` items of the epoch are done; with none left to make a batch of, it is over."""
        left = self._length(epoch) - end
        over = left < self.whole if self.rest is Rest.DROPPED else not left
        return Position(epoch + 1) if over else Position(epoch, end)


def _between(stretches: list[Stretch], begin: int, end: int) -> list[Stretch]:
    """Items begin .. end-1 of all that the stretches hold."""
    found = []
    for epoch, first, last in stretches:
        low, high = max(first + begin, first), min(first + end, last)
        if low < high:
            found.append((epoch, low, high))
        begin, end = begin - (last - first), end - (last - first)
    return found


class IndexBatches(Protocol):
    """A batch sampler of one rank, with keys."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[KeyedBatch]: ...


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
