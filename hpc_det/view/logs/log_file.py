"""One log, read on where the last call ended, as passages: lines that were written together.

One that this user may not read is as if it were not there: a site's epilog may have closed it, or its owner's group.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpc_det.store.folders import times_of
from hpc_det.store.log_lines import Moment, moments_after, size_before


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


BLOCK_BYTES = 65536
"""About the longest passage, so that logs of many ranks are merged in little memory."""


class LogFile:
    """The file may come later, and may be replaced by another one, which is then read from its top."""

    def __init__(self, path: Path, source: Source) -> None:
        self.path = path
        self._source = source
        self._inode: int | None = None
        self._position = 0

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Those since the last call; with `final`, also a last line that has no end."""
        with suppress(FileNotFoundError, PermissionError), open(self.path, "rb") as file:
            now = self._found(file)
            if self._position >= now.size:
                return
            file.seek(self._position)
            is_timed = not final or times_of(self.path).exists()  # what goes on may be noted in a moment
            for moment in chain(moments_after(self.path, self._position), [now]):
                while self._position < moment.size:
                    if not (text := self._read(file, moment.size - self._position, final)):
                        return
                    yield Passage(self._source, moment.time, text.removesuffix("\n").split("\n"), is_timed)

    def skip_to_last(self, count: int) -> bool:
        """Go on with the last `count` lines, not before them; whether there are so many."""
        with suppress(FileNotFoundError, PermissionError), open(self.path, "rb") as file:
            begin = _begin_of_last(file, self._found(file).size, count)
            self._position = max(self._position, begin)
            return begin > 0
        return False

    def skip_before(self, time: float) -> None:
        """Go on with what was written since `time`, as far as that is known."""
        with suppress(FileNotFoundError, PermissionError), open(self.path, "rb") as file:
            now = self._found(file)
            before = now.size if now.time < time else size_before(self.path, time)
            if before > 0:
                file.seek(before - 1)
                file.readline()
                self._position = file.tell()

    def _found(self, file: BinaryIO) -> Moment:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._position:
            self._inode, self._position = found.st_ino, 0
        return Moment(found.st_size, found.st_mtime)

    def _read(self, file: BinaryIO, count: int, final: bool) -> str:
        """About `count` bytes: whole lines, of which the last may end behind them."""
        data = file.read(min(count, BLOCK_BYTES))
        if not data.endswith(b"\n"):
            data += file.readline()
        if not final:
            data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        return data.decode(errors="replace")


def _begin_of_last(file: BinaryIO, size: int, count: int) -> int:
    """Where the last `count` lines begin, beside one that lacks its end; read from the end, in blocks."""
    missing, begin = count + 1, size
    while begin > 0:
        end, begin = begin, max(begin - BLOCK_BYTES, 0)
        block = os.pread(file.fileno(), end - begin, begin)
        if (found := block.count(b"\n")) >= missing:
            return begin + len(block.rsplit(b"\n", missing)[0]) + 1
        missing -= found
    return 0
