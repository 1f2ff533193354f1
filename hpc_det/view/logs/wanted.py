"""Which lines are wanted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpc_det.view.logs.levels import LEVELS, Levels
from hpc_det.view.logs.passage import Passage


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """None wants all."""

    rank: int | None = None
    since: float | None = None
    """In seconds since the epoch."""
    level: str | None = None
    """The least serious one of LEVELS."""


class Selection:
    """The wanted moments and levels, of logs whose passages come one after the other."""

    def __init__(self, wanted: Wanted) -> None:
        self._since = wanted.since or 0.0
        self._levels = LEVELS[LEVELS.index(wanted.level) :] if wanted.level else None
        self._level_of = Levels()

    def of(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        recent = (passage for passage in passages if passage.time >= self._since)
        return self._serious(recent, self._levels) if self._levels else recent

    def _serious(self, passages: Iterable[Passage], wanted: Iterable[str]) -> Iterator[Passage]:
        for passage in passages:
            told = zip(passage.lines, self._level_of.of(passage), strict=True)
            if serious := [(line, level) for line, level in told if level in wanted]:
                lines, levels = zip(*serious, strict=True)
                yield passage._replace(lines=[*lines], levels=[*levels])
