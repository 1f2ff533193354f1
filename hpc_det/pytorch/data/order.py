"""The order of an epoch's records: a permutation that is computed where it is looked at and stored nowhere.

A function of (seed, epoch, length) alone, independent of every global generator and the same with every version of
numpy, so that a resume may start in the middle of the epoch at once.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpc_det.distributed.rng import mixed_seed

Numbers = NDArray[np.int64]
Bits = NDArray[np.uint64]

SORTED_UP_TO = 2**14
"""A list of this length costs 128 KiB and half a millisecond, and looking it up costs nothing."""
ROUNDS = 8
"""With four, statistics of pairs tell a cipher of some dozen numbers from chance; with eight they do not."""
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Order(Protocol):
    def __getitem__(self, positions: Numbers, /) -> Numbers:
        """The records at these positions of the epoch, in the shape of `positions`."""
        ...


def epoch_order(seed: int, epoch: int, length: int) -> Order:
    """A permutation of 0 .. length-1, for lengths below 2**62."""
    start = np.uint64(mixed_seed("order of records", seed, epoch))
    if length <= SORTED_UP_TO:
        return _by_sorting(start, length)
    return FeistelOrder(start, length)


def _by_sorting(start: np.uint64, length: int) -> Order:
    """Every permutation equally likely; the keys differ, since `_mixed` is one to one."""
    order: Order = np.argsort(_stream(start, length))
    return order


class FeistelOrder:
    """A Feistel cipher over the numbers below `high` * 2**bits, the fewest that hold the length (Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002). A number beyond the length is enciphered again until it is not:
    one in some thousands, as high and 2**bits are near the root of the length.
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
            high = np.minimum(high, high - self._high)  # modulo self._high: below it, the difference wraps around
        return (high << self._bits) | low


def _stream(start: np.uint64, count: int) -> Bits:
    """The first `count` numbers of SplitMix64 (Steele, Lea and Flood 2014) from `start`."""
    return _mixed(np.arange(count, dtype=np.uint64) * GOLDEN + start)


def _mixed(numbers: Bits) -> Bits:
    """SplitMix64's finalizer: one to one, each bit of the result depends on all bits of the number."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
