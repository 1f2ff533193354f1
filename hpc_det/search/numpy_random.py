"""numpy's legacy `RandomState` of one whole number, in pure Python: the same draws without loading numpy.

Both it and `random.Random` are the generator MT19937. They differ in how a seed fills its state and in how whole
numbers of a range are made of its words.
"""

from __future__ import annotations

import random

_WORDS = 624
_VERSION = 3
"""Of the state that `random.Random.setstate` takes."""


class NumpyRandom:
    """Draws as `numpy.random.RandomState(seed)` does, call by call."""

    def __init__(self, seed: int) -> None:
        """`seed`: 0 .. 2**32 - 1."""
        self._generator = random.Random()
        self._generator.setstate((_VERSION, (*_initial_words(seed), _WORDS), None))

    def random(self) -> float:
        """0 <= x < 1 with 53 random bits, as `random_sample()`."""
        return self._generator.random()

    def uniform(self, low: float, high: float, /) -> float:
        return low + (high - low) * self.random()

    def uint32(self) -> int:
        return self._generator.getrandbits(32)

    def randrange(self, low: int, high: int, /) -> int:
        """low <= x < high, at most 2**64 of them, as `randint(low, high, dtype=int64)`.

        Words are masked to the bits that the range needs, until one lies in it. A range of one draws nothing.
        """
        last = high - low - 1
        if last == 0:
            return low
        draw = self.uint32 if last < 2**32 else self._uint64
        mask = (1 << last.bit_length()) - 1
        while (word := draw() & mask) > last:
            pass
        return low + word

    def _uint64(self) -> int:
        return self.uint32() << 32 | self.uint32()


def _initial_words(seed: int) -> list[int]:
    """The generator's state as its authors' `init_genrand` fills it (Matsumoto and Nishimura, mt19937ar)."""
    words = [seed]
    for i in range(1, _WORDS):
        words.append(1812433253 * (words[-1] ^ words[-1] >> 30) + i & 0xFFFFFFFF)
    return words
