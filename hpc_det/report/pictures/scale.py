"""Axes: where a value lies, and which values are written beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOG_FROM = 50.0
"""Positive values whose greatest is so many times the smallest are shown by their logarithm."""

SAME = 1e-6
"""Values that differ by so small a part of themselves are one place: nobody could read the ticks between."""


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    low: float
    high: float
    begin: float
    """The pixel of `low`."""
    end: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float, *, may_be_log: bool = True) -> Scale:
        """Wide enough for all of the values, which are finite."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        greatest = max(abs(low), abs(high))
        if high - low <= SAME * greatest:
            return cls(low - (greatest or 1.0) / 2, high + (greatest or 1.0) / 2, begin, end)
        return cls(low, high, begin, end, is_log=may_be_log and low > 0 and high / low >= LOG_FROM)

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values within the axis."""
        return _log_ticks(self.low, self.high, most) if self.is_log else _ticks(self.low, self.high, most)


def _ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.9g}") for index in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = max(1, math.ceil((last - first) / most))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    return [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
