"""SVG elements in which text is escaped, and scales from values to pixels with their ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element. Children that are not Markup are escaped.

    In names of attributes, a final underscore is dropped and others become hyphens: `class_`, `data_t`. Attributes with
    the value None are omitted.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{''.join(map(escape, children))}</{name}>")


def _short(value: object) -> object:
    """Return a float as text, rounded to a tenth of a pixel; any other value unchanged."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def picture(
    width: float, height: float, said: str, parts: Iterable[str], class_: str = "picture", **attributes: object
) -> Markup:
    """Return a picture. `said`: its description for screen readers."""
    inside = (element("title", said), *parts)
    return element("svg", *inside, viewBox=f"0 0 {width:g} {height:g}", role="img", class_=class_, **attributes)


def text(x: float, y: float, words: str, class_: str | None = None, anchor: str | None = None) -> Markup:
    return element("text", words, x=x, y=y, class_=class_, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return element("path", d=f"M{_short(x1)},{_short(y1)}L{_short(x2)},{_short(y2)}", class_=class_)


def of_line(line: int | str, *children: str, name: str = "g", class_: str = "", **attributes: object) -> Markup:
    """Return an element that page.js highlights together with all other elements of the line, which is a trial."""
    return element(name, *children, class_=f"t {class_}".rstrip(), data_t=line, **attributes)


def place(x: float, y: float) -> str:
    """Return a point for the `d` attribute of a path."""
    return f"{_short(float(x))},{_short(float(y))}"


LOG_FROM = 50.0
"""Ratio of the largest to the smallest positive value above which an axis is logarithmic."""

SAME = 1e-6
"""Relative difference below which values count as equal, since ticks between them could not be read."""


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic scale from values to pixels."""

    low: float
    high: float
    begin: float
    """Coordinate of `low`, in pixels."""
    end: float
    """Coordinate of `high`, in pixels."""
    is_log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float, *, may_be_log: bool = True) -> Scale:
        """Return a scale on which all of these finite values lie."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        greatest = max(abs(low), abs(high))
        if high - low <= SAME * greatest:
            return cls(low - (greatest or 1.0) / 2, high + (greatest or 1.0) / 2, begin, end)
        return cls(low, high, begin, end, is_log=may_be_log and low > 0 and high / low >= LOG_FROM)

    def at(self, value: float) -> float:
        """Return the coordinate of a value, in pixels."""
        low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        return self.begin + (value - low) / (high - low) * (self.end - self.begin)

    def ticks(self, most: int = 5) -> list[float]:
        """Return about `most` round values within the axis."""
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
