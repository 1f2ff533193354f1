"""One log, read in passages from where the last call ended; a passage contains lines that were written together.

A log without read permission counts as missing: a site's epilog, or the owner's group, may have closed it.
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
    """The origin of log lines: the ranks, or the job's other processes, of an attempt; or a job outside any trial."""

    trial: int | None = None
    attempt: int | None = None
    rank: int | None = None
    """Number of the rank; None for the job, its agents or its launcher."""
    job: str | None = None
    """Name of the job's log without `.log`, for output outside any trial."""


class Passage(NamedTuple):
    """Lines of one log that appeared between two checks of its size, so that no other line belongs between them."""

    source: Source
    time: float
    """Time at which the last line was written, in seconds since the epoch."""
    lines: list[str]
    is_timed: bool = True
    """False if no times were recorded; then `time` is the modification time of the log."""
    levels: list[str] | None = None
    """Level of each line, if lines were selected by level: a line without a level has that of a line before it."""

    def part(self, which: slice) -> Passage:
        """Return the passage with only these of its lines."""
        return self._replace(lines=self.lines[which], levels=self.levels and self.levels[which])

    @property
    def place(self) -> tuple[int, float]:
        """Sort key for a trial's lines: attempt and time. Logs without times come first in their attempt."""
        return self.source.attempt or 0, self.time if self.is_timed else 0.0


def first(passages: Iterable[Passage], count: int) -> Iterator[Passage]:
    """Yield the passages with the first `count` lines, without reading further."""
    for passage in passages if count else ():
        yield passage.part(slice(count))
        count -= len(passage.lines)
        if count <= 0:
            return


def last(passages: Iterable[Passage], count: int) -> list[Passage]:
    """Return the passages with the last `count` lines."""
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
"""Approximate length of the longest passage, so that merging the logs of many ranks takes little memory."""


class LogFile:
    """A log file. It may be created later, and is read from its start again if it is replaced."""

    def __init__(self, path: Path, source: Source) -> None:
        self.path = path
        self._source = source
        self._inode: int | None = None
        self._position = 0

    def passages(self, *, final: bool = False) -> Iterator[Passage]:
        """Yield the passages since the last call; with `final`, including a last line without an end."""
        with suppress(FileNotFoundError, PermissionError), open(self.path, "rb") as file:
            now = self._found(file)
            if self._position >= now.size:
                return
            file.seek(self._position)
            # before the end, the missing index of times may be created a moment later
            is_timed = not final or times_of(self.path).exists()
            for moment in chain(moments_after(self.path, self._position), [now]):
                while self._position < moment.size:
                    if not (text := self._read(file, moment.size - self._position, final)):
                        return
                    yield Passage(self._source, moment.time, text.removesuffix("\n").split("\n"), is_timed)

    def skip_to_last(self, count: int) -> bool:
        """Skip to the last `count` lines, and return whether there are that many."""
        with suppress(FileNotFoundError, PermissionError), open(self.path, "rb") as file:
            begin = _begin_of_last(file, self._found(file).size, count)
            self._position = max(self._position, begin)
            return begin > 0
        return False

    def skip_before(self, time: float) -> None:
        """Skip the lines that are known to be older than `time`, in seconds since the epoch."""
        with suppress(FileNotFoundError, PermissionError), open(self.path, "rb") as file:
            now = self._found(file)
            before = now.size if now.time < time else size_before(self.path, time)
            if before > 0:
                file.seek(before - 1)  # a line that was incomplete at that size is skipped as a whole
                file.readline()
                self._position = file.tell()

    def _found(self, file: BinaryIO) -> Moment:
        """Return the size and time of the file; if it was replaced or truncated, continue at its start."""
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._position:
            self._inode, self._position = found.st_ino, 0
        return Moment(found.st_size, found.st_mtime)

    def _read(self, file: BinaryIO, count: int, final: bool) -> str:
        """Return about `count` bytes of whole lines; the last line may exceed that."""
        data = file.read(min(count, BLOCK_BYTES))
        if not data.endswith(b"\n"):
            data += file.readline()
        if not final:
            data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        return data.decode(errors="replace")


def _begin_of_last(file: BinaryIO, size: int, count: int) -> int:
    """Return the offset of the last `count` lines, not counting one without an end.

    The file is read backwards in blocks.
    """
    missing, begin = count + 1, size  # + 1: the end of the line before them
    while begin > 0:
        end, begin = begin, max(begin - BLOCK_BYTES, 0)
        block = os.pread(file.fileno(), end - begin, begin)
        if (found := block.count(b"\n")) >= missing:
            return begin + len(block.rsplit(b"\n", missing)[0]) + 1
        missing -= found
    return 0
