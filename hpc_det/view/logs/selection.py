"""Selecting lines of logs by rank, time and level, which is read from the common formats of log lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpc_det.view.logs.log_file import Passage, Source

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
"""Levels, from least to most severe."""
_DEFAULT = "INFO"
_OTHER_WORDS = {"WARN": "WARNING", "FATAL": "CRITICAL", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_WORD = r"(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b"
_NAMED = re.compile(
    "|".join(
        (
            rf"{_WORD}(?::| -| \||\s+\S+:)",  # logging's own format, Determined's "INFO: [12] name: "
            rf"\[?\d{{4}}-\d\d-\d\d[ T].{{0,100}}?\b{_WORD}",  # anything behind a date: Hydra, DeepSpeed, loguru
            rf".{{0,60}}?\[{_WORD}\s*\]",
            r"\[?([IWEF])\d{4} \d\d:\d\d:\d\d",  # glog's, as in torch's C++ and its launcher
        )
    )
)
_KNOWN = (
    (re.compile(r"Traceback \(most recent call last\)|hpc-det: \d\d:\d\d:\d\d first failure: "), "ERROR"),
    (re.compile(r"[\w-]+: (?:error|fatal): "), "ERROR"),  # srun and similar commands
    (re.compile(r"[\w-]+: warning: |\S+:\d+: \w*Warning: "), "WARNING"),  # the second are Python's warnings
    (re.compile(r"hpc-det: "), "INFO"),
)
_PREFIX = re.compile(r"(?:\[rank=?\d+\]:? ?)?")
"""The prefix that wrap_rank writes, and that torch writes before the traceback of a rank."""


def level_of(line: str) -> str | None:
    """Return the level that the line contains or that its form implies; None: neither."""
    begin = _PREFIX.match(line).end()  # type: ignore[union-attr]  # it matches the empty string
    if found := _NAMED.match(line, begin):
        word = found[found.lastindex or 0]
        return _OTHER_WORDS.get(word, word)
    return next((level for pattern, level in _KNOWN if pattern.match(line, begin)), None)


class Levels:
    """Determines the levels of the lines of any number of logs.

    A line without a level has that of the line before it, if both were written together or it is indented, as in
    tracebacks and long messages. A line without a level that is printed later is INFO.
    """

    def __init__(self) -> None:
        self._last: dict[Source, tuple[str, float]] = {}
        """Level and time of the last line of each source."""

    def of(self, passage: Passage) -> Iterator[str]:
        """Yield the level of each line. Must be called with the passages of a log in their order."""
        above, time = self._last.get(passage.source, (_DEFAULT, 0.0))
        goes_on = passage.time == time or passage.lines[0][:1].isspace()
        level = above if goes_on else _DEFAULT
        for line in passage.lines:
            level = level_of(line) or level
            yield level
        self._last[passage.source] = level, passage.time


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The selected lines; None selects all."""

    rank: int | None = None
    since: float | None = None
    """Seconds since the epoch."""
    level: str | None = None
    """Lowest selected level."""


class Selection:
    """Selects lines by time and level. Must be used with the passages of each log in their order."""

    def __init__(self, wanted: Wanted) -> None:
        self._since = wanted.since or 0.0
        self._levels = LEVELS[LEVELS.index(wanted.level) :] if wanted.level else None
        self._level_of = Levels()

    def of(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        recent = (passage for passage in passages if passage.time >= self._since)
        return self._serious(recent, self._levels) if self._levels else recent

    def _serious(self, passages: Iterable[Passage], wanted: Iterable[str]) -> Iterator[Passage]:
        for passage in passages:
            pairs = zip(passage.lines, self._level_of.of(passage), strict=True)
            if serious := [(line, level) for line, level in pairs if level in wanted]:
                lines, levels = zip(*serious, strict=True)
                yield passage._replace(lines=[*lines], levels=[*levels])
