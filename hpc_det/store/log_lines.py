"""The lines of a log: when they were written, and which of them a job prints about itself.

Ranks write their logs themselves, without times: a line that passed through another process would be lost if that one
were killed. Instead, whoever watches a log looks at its size now and then, and appends a line to an index beside the
log when it has grown: the size in bytes, and the time of the last write as the file system reports it.

            5120 1764000000.125
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.files import is_shared, let_group_read, open_file, open_log
from hpc_det.store.folders import times_of

LINE_BYTES = 32
"""All lines have this length, so that one is found by halving."""


class Moment(NamedTuple):
    size: int
    """Bytes of the log that were there."""
    time: float
    """In seconds since the epoch."""


class LogTimes:
    """The index of one log, for who writes it: one process at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size = 0
        self._descriptor: int | None = None
        self._end = 0

    def look(self) -> bool:
        """Note whether the log has grown since the last look, and say so. On a full disk training goes on without."""
        with suppress(OSError):
            found = os.stat(self._log)
            if found.st_size > self._size:
                self._size = found.st_size
                self._append(Moment(found.st_size, found.st_mtime))
                return True
        return False

    def _append(self, moment: Moment) -> None:
        """What a full disk has cut is written over by the next line."""
        if self._descriptor is None:
            self._descriptor = open_file(times_of(self._log), os.O_WRONLY | os.O_CREAT)
            self._end = _whole_lines(self._descriptor) * LINE_BYTES
        line = f"{moment.size:16d} {moment.time:14.3f}\n".encode()
        if disk.write_at(self._descriptor, line, self._end) == LINE_BYTES:
            self._end += LINE_BYTES

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def moments_after(log: Path, size: int) -> Iterator[Moment]:
    """Those at which the log had more bytes than `size`, oldest first; none of a log without an index."""
    with suppress(FileNotFoundError, PermissionError), open(times_of(log), "rb") as file:
        count = _whole_lines(file.fileno())
        first = bisect_right(range(count), size, key=lambda index: _moment(file, index).size)
        file.seek(first * LINE_BYTES)
        yield from (_parsed(line, file.name) for line in islice(file, count - first))


def size_before(log: Path, time: float) -> int:
    """How many bytes of the log were there before `time`; 0 for a log without an index."""
    with suppress(FileNotFoundError, PermissionError), open(times_of(log), "rb") as file:
        count = _whole_lines(file.fileno())
        first = bisect_left(range(count), time, key=lambda index: _moment(file, index).time)
        return _moment(file, first - 1).size if first else 0
    return 0


def _whole_lines(descriptor: int) -> int:
    return os.fstat(descriptor).st_size // LINE_BYTES


def _moment(file: BinaryIO, index: int) -> Moment:
    return _parsed(os.pread(file.fileno(), LINE_BYTES, index * LINE_BYTES), file.name)


def _parsed(line: bytes, path: str | Path) -> Moment:
    try:
        return Moment(int(line[:16]), float(line[16:]))
    except ValueError:
        raise HpcDetError(f"{path}: damaged; remove it to read the log without times") from None


_ANY = r"hpc-det: \d\d:\d\d:\d\d "
ATTEMPT_BEGINS = re.compile(_ANY + r"attempt (\d+) begins")
"""The whole line; the log of a trial's attempts is one file for all of them."""
OF_WORKER = re.compile(_ANY + r"worker \d+: ")
"""The beginning of each line of a worker."""


def say(text: str) -> None:
    with suppress(OSError):  # on a full disk the job goes on
        print(f"hpc-det: {time.strftime('%H:%M:%S')} {text}", flush=True)


def say_attempt_begins(number: int) -> None:
    say(f"attempt {number} begins")


def say_of_worker(number: int, text: str) -> None:
    say(f"worker {number}: {text}")


def share_own_log(folder: Path) -> None:
    """Schedulers make a job's log by the umask of its submission. Of a job that prints into a file of `folder`."""
    if is_shared(folder) and Path(os.readlink("/proc/self/fd/1")).parent == folder.resolve():
        let_group_read(1)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """What this process and its children print. When is noted at the begin and at the end; in between, agents do it."""
    note_time(path)
    descriptor = open_log(path)
    former = os.dup(1), os.dup(2)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    try:
        yield
    finally:
        for standard, before in zip((1, 2), former, strict=True):
            os.dup2(before, standard)
            os.close(before)
        note_time(path)


def note_time(path: Path) -> None:
    """When the log was written last."""
    with closing(LogTimes(path)) as times:
        times.look()
