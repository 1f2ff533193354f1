"""How the items of an epoch are cut into global batches, and those into the shares of ranks.

The position counts items, not batches, so that a resume, also on another number of ranks, goes on at the right one:
nothing twice, nothing left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hpc_det.errors import UsageError
from hpc_det.pytorch.data.order import Items


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
