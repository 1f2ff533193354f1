"""The items of each epoch in their order: the records of a data set, or the items that a user's sampler yields.

The order of shuffled records is a permutation that is computed on access and not stored. It is a function of (seed,
epoch, length) alone, independent of every global generator and the same with every version of numpy. So a resumed run
can start in the middle of an epoch at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils import data

from hpc_det.core.external_loader import set_epoch
from hpc_det.distributed.rng import mixed_seed, seeded
from hpc_det.errors import UsageError, count

Numbers = NDArray[np.int64]
Bits = NDArray[np.uint64]

CHUNK = 2**16
"""Items of a sampler that are held in a Python list at a time."""
SORTED_UP_TO = 2**14
"""Longest epoch whose order is stored as an array, which takes 128 KiB and half a millisecond."""
ROUNDS = 8
"""Rounds of the Feistel cipher. With four, statistics of pairs distinguish a cipher of a few dozen numbers from chance;
with eight they do not.
"""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment of SplitMix64."""


class Items(Protocol):
    """The items of every epoch, indexed by epoch and place."""

    name: str
    """The name of the items, a plural for messages."""

    @property
    def nominal_length(self) -> int:
        """Items per epoch according to len() of the data set or the sampler."""
        ...

    def length(self, epoch: int) -> int:
        """Return the number of items that the epoch really has."""
        ...

    def rows(self, epoch: int, places: Numbers) -> list[list[Any]]:
        """Return the items of `epoch` at `places`, a two-dimensional array of indices, in rows of the same shape."""
        ...


class Records:
    """Record numbers 0 to length - 1: in this order, or with a seed in another order each epoch. None are stored."""

    name = "records"

    def __init__(self, length: int, seed: int | None) -> None:
        self.nominal_length = length
        self._seed = seed
        self._order: tuple[int, Order] | None = None

    def length(self, epoch: int) -> int:
        return self.nominal_length

    def rows(self, epoch: int, places: Numbers) -> list[list[Any]]:
        numbers = places if self._seed is None else self._of(epoch, self._seed)[places]
        rows: list[list[Any]] = numbers.tolist()
        return rows

    def _of(self, epoch: int, seed: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(seed, epoch, self.nominal_length))
        return self._order[1]


class Drawn:
    """The items that a sampler yields, one epoch at a time: at most as many as its `len()` at that epoch.

    It is iterated with the global generators seeded from (seed, epoch), so that torch's random samplers are functions
    of both. For a sampler that may have other state, earlier epochs are iterated first, also after a resume.
    """

    def __init__(self, name: str, sampler: Iterable[Any], seed: int) -> None:
        self.name = name
        self._sampler = sampler
        self._seed = seed
        self._next_epoch = 0
        self._lengths: dict[int, int] = {}
        self._drawn: dict[int, Sequence[Any] | Numbers] = {}
        """The items by epoch; epochs before the one last accessed are removed."""

    @property
    def nominal_length(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # the DataLoader has checked that it has one

    def length(self, epoch: int) -> int:
        if epoch not in self._lengths:
            self._draw(epoch)
        return self._lengths[epoch]

    def rows(self, epoch: int, places: Numbers) -> list[list[Any]]:
        if epoch not in self._drawn:
            self._draw(epoch)
        for past in [known for known in self._drawn if known < epoch]:
            del self._drawn[past]
        items = self._drawn[epoch]
        if isinstance(items, np.ndarray):
            rows: list[list[Any]] = items[places].tolist()
            return rows
        return [[items[place] for place in row] for row in places.tolist()]

    def _draw(self, epoch: int) -> None:
        if not _is_stateless(self._sampler):
            if epoch < self._next_epoch:
                raise UsageError(
                    f"DataLoader: {type(self._sampler).__name__} has already yielded the {self.name} of epoch "
                    f"{self._next_epoch - 1} and cannot go back to epoch {epoch}; make a new DataLoader"
                )
            for earlier in range(self._next_epoch, epoch):
                self._iterated(earlier)
        self._drawn[epoch] = self._iterated(epoch)
        self._lengths[epoch] = len(self._drawn[epoch])
        self._next_epoch = epoch + 1

    def _iterated(self, epoch: int) -> Sequence[Any] | Numbers:
        with seeded(mixed_seed("sampler", self._seed, epoch)):
            set_epoch(self._sampler, epoch)
            most = self.nominal_length  # after set_epoch, which may change the length
            return _compact(self._sampler, most)


class _Checked:
    """Items that return those of another object; subclasses check them first."""

    def __init__(self, items: Items) -> None:
        self._items = items
        self.name = items.name
        self.nominal_length = items.nominal_length

    def length(self, epoch: int) -> int:
        return self._items.length(epoch)

    def rows(self, epoch: int, places: Numbers) -> list[list[Any]]:
        return self._items.rows(epoch, places)


class Nominal(_Checked):
    """Items whose epochs must have the length that the sampler reports, because other ranks rely on it."""

    def length(self, epoch: int) -> int:
        """Return the epoch's length. Raises UsageError if it is not the nominal length."""
        length = super().length(epoch)
        if length != self.nominal_length:
            raise UsageError(
                f"DataLoader: the sampler yields {length} {self.name} in epoch {epoch}, but its len() was "
                f"{self.nominal_length}, which other ranks rely on; yield the same number in every epoch"
            )
        return length


class SameSize(_Checked):
    """Batches of a batch sampler that must all have as many records as the first one accessed."""

    _size: int | None = None

    def rows(self, epoch: int, places: Numbers) -> list[list[Any]]:
        """Return the batches. Raises UsageError if one has another size."""
        rows = super().rows(epoch, places)
        for size in (len(batch) for row in rows for batch in row):
            self._size = self._size or size
            if size != self._size:
                raise UsageError(
                    f"DataLoader: the batch sampler yields batches of {self._size} and of {count(size, 'record')}, "
                    "but a pipeline takes one size only; set drop_last=True in it"
                )
        return rows


STATELESS = (
    list,
    tuple,
    range,
    data.SequentialSampler,
    data.RandomSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    data.DistributedSampler,
)


def _is_stateless(sampler: Any) -> bool:
    """Return whether the sampler's items in an epoch depend only on the epoch and the global generators.

    Then a resumed run need not iterate earlier epochs. Samplers with their own generator do not qualify, nor do
    subclasses, which may have any state.
    """
    if type(sampler) is data.BatchSampler:
        return _is_stateless(sampler.sampler)
    return type(sampler) in STATELESS and getattr(sampler, "generator", None) is None


def _compact(sampler: Iterable[Any], most: int) -> Sequence[Any] | Numbers:
    """Return at most `most` items: integers as an array, which takes a fifth of the memory of a list."""
    iterator = islice(sampler, most + 1)  # one more, so that the sampler's own iterator runs to its end
    chunks: list[Numbers] = []
    while chunk := list(islice(iterator, CHUNK)):
        if not all(type(item) is int for item in chunk):
            return [*(item for known in chunks for item in known.tolist()), *chunk, *iterator][:most]
        chunks.append(np.array(chunk, dtype=np.int64))
    return np.concatenate(chunks)[:most] if chunks else []


# --- the order of shuffled records


class Order(Protocol):
    """A permutation of record numbers."""

    def __getitem__(self, positions: Numbers, /) -> Numbers:
        """Return the records at these positions of the epoch, in the shape of `positions`."""
        ...


def epoch_order(seed: int, epoch: int, length: int) -> Order:
    """Return a permutation of 0 to length - 1, for lengths below 2**62."""
    start = np.uint64(mixed_seed("order of records", seed, epoch))
    if length <= SORTED_UP_TO:
        return _by_sorting(start, length)
    return FeistelOrder(start, length)


def _by_sorting(start: np.uint64, length: int) -> Order:
    """Return a stored permutation; every permutation is equally likely."""
    # No two keys are equal, because `_mixed` is one to one: so the order does not depend on numpy's sorting algorithm.
    order: Order = np.argsort(_stream(start, length))
    return order


class FeistelOrder:
    """A permutation that is computed on access, by a Feistel cipher (Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002).

    Its domain is the numbers below `high` * 2**bits, the smallest such domain that includes the length. A result beyond
    the length is enciphered again until it is within. This affects one number in some thousands, because `high` and
    2**bits are close to the square root of the length.
    """

    def __init__(self, start: np.uint64, length: int) -> None:
        bits = length.bit_length() // 2
        self._length = np.uint64(length)
        self._bits = np.uint64(bits)
        self._low_bits = np.uint64(2**bits - 1)
        self._top = np.uint64(64 - bits)
        self._high = np.uint64(-(-length // 2**bits))
        self._keys = _stream(start, ROUNDS).reshape(-1, 2)

    def __getitem__(self, positions: Numbers, /) -> Numbers:
        numbers = self._enciphered(positions.astype(np.uint64))
        beyond = numbers >= self._length
        while beyond.any():
            numbers[beyond] = self._enciphered(numbers[beyond])
            beyond = numbers >= self._length
        return numbers.astype(np.int64)

    def _enciphered(self, numbers: Bits) -> Bits:
        low, high = numbers & self._low_bits, numbers >> self._bits
        for low_key, high_key in self._keys:
            low ^= _mixed(high + low_key) >> self._top
            high += (_mixed(low + high_key) >> np.uint64(32)) * self._high >> np.uint64(32)
            high = np.minimum(high, high - self._high)  # modulo self._high: if high is smaller, the difference wraps
        return (high << self._bits) | low


def _stream(start: np.uint64, count: int) -> Bits:
    """Return the first `count` numbers of SplitMix64 (Steele, Lea and Flood 2014) from `start`."""
    return _mixed(np.arange(count, dtype=np.uint64) * GOLDEN + start)


def _mixed(numbers: Bits) -> Bits:
    """Return SplitMix64's finalizer of each number: one to one, each bit of the result depends on all input bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
