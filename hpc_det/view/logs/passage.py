"""Lines that were written together, and some of many of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Source(NamedTuple):
    """Who printed."""

    trial: int | None = None
    attempt: int | None = None
    rank: int | None = None
    """None: the job, its agents or its launcher."""
    job: str | None = None
    """Outside of any trial: the name of the job's log."""


class Passage(NamedTuple):
    """Lines of one log that were not there at one look at it, and were at the next one: nothing comes in between."""

    source: Source
    time: float
    """When the last of it was written, in seconds since the epoch."""
    lines: list[str]
    is_timed: bool = True
    """Otherwise nobody has noted times, and `time` is when the whole log was written last."""
    levels: list[str] | None = None
    """Of each line, where lines were left out by their levels: what names none belongs to a line above it."""

    def part(self, which: slice) -> Passage:
        """Some of its lines."""
        return self._replace(lines=self.lines[which], levels=self.levels and self.levels[which])

    @property
    def place(self) -> tuple[int, float]:
        """In the order of a trial's lines. Logs without times come first in their attempt, one after the other."""
        return self.source.attempt or 0, self.time if self.is_timed else 0.0


def first(passages: Iterable[Passage], count: int) -> Iterator[Passage]:
    """The first `count` lines; nothing is read behind them."""
    for passage in passages if count else ():
        yield passage.part(slice(count))
        count -= len(passage.lines)
        if count <= 0:
            return


def last(passages: Iterable[Passage], count: int) -> list[Passage]:
    """The last `count` lines."""
    kept: deque[Passage] = deque()
    surplus = -count
    for passage in passages:
        kept.append(passage)
        surplus += len(passage.lines)
        while kept and surplus >= len(kept[0].lines):
            surplus -= len(kept.popleft().lines)
    if kept and surplus > 0:
        kept[0] = kept[0].part(slice(surplus, None))
    return list(kept)
