"""The lines of logs: an index of when they were written, and the lines that jobs print about themselves.

Ranks write directly to their log files, without times: if lines passed through another process, some would be lost when
it is killed. Instead, a process that watches a log checks its size regularly. When the log has grown, it appends a line
to an index beside the log: the size in bytes, and the log's modification time, in seconds since the epoch.

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
"""Length of all lines of an index, so that binary search works."""


class Moment(NamedTuple):
    """A line of an index."""

    size: int
    """Size of the log in bytes."""
    time: float
    """Modification time of the log, in seconds since the epoch."""


class LogTimes:
    """The index of one log, for writing. Only one process at a time may write it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size = 0
        self._descriptor: int | None = None
        """Descriptor of the index; None until the log has grown."""
        self._end = 0
        """Bytes of complete lines in the index."""

    def look(self) -> bool:
        """Append to the index if the log has grown since the last call; return whether it has."""
        with suppress(OSError):  # training continues without an index, for instance on a full disk
            found = os.stat(self._log)
            if found.st_size > self._size:
                self._size = found.st_size
                self._append(Moment(found.st_size, found.st_mtime))
                return True
        return False

    def _append(self, moment: Moment) -> None:
        """Append a line to the index."""
        if self._descriptor is None:
            self._descriptor = open_file(times_of(self._log), os.O_WRONLY | os.O_CREAT)
            self._end = _whole_lines(self._descriptor) * LINE_BYTES
        line = f"{moment.size:16d} {moment.time:14.3f}\n".encode()
        # A line that a full disk has cut short is overwritten by the next one
        if disk.write_at(self._descriptor, line, self._end) == LINE_BYTES:
            self._end += LINE_BYTES

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def moments_after(log: Path, size: int) -> Iterator[Moment]:
    """Yield the moments at which the log had more than `size` bytes, oldest first; none if it has no index."""
    with suppress(FileNotFoundError, PermissionError), open(times_of(log), "rb") as file:
        count = _whole_lines(file.fileno())
        first = bisect_right(range(count), size, key=lambda index: _moment(file, index).size)
        file.seek(first * LINE_BYTES)
        yield from (_parsed(line, file.name) for line in islice(file, count - first))


def size_before(log: Path, time: float) -> int:
    """Return the size of the log before `time`, in bytes; 0 if it has no index. `time`: in seconds since the epoch."""
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
"""The line in a trial's log, which is one file for all attempts, at which an attempt begins."""
OF_WORKER = re.compile(_ANY + r"worker \d+: ")
"""The beginning of the lines that a worker prints."""


def say(text: str) -> None:
    """Print a line of a job, with the time of day."""
    with suppress(OSError):  # the job continues, for instance on a full disk
        print(f"hpc-det: {time.strftime('%H:%M:%S')} {text}", flush=True)


def say_attempt_begins(number: int) -> None:
    """Print the line that ATTEMPT_BEGINS matches."""
    say(f"attempt {number} begins")


def say_of_worker(number: int, text: str) -> None:
    """Print a line of a worker, as OF_WORKER matches it."""
    say(f"worker {number}: {text}")


def share_own_log(folder: Path) -> None:
    """Let the group read the log of this job, if stdout is a file in `folder` and the folder is shared."""
    # The scheduler created it with the umask of the submission
    if is_shared(folder) and Path(os.readlink("/proc/self/fd/1")).parent == folder.resolve():
        let_group_read(1)


@contextmanager
def printed_to(path: Path) -> Iterator[None]:
    """Append the output of this process and its children in this block to the log `path`."""
    note_time(path)  # at the beginning and the end of the block; node agents update the index in between
    # Duplicates of the descriptors, not of Python's sys.stdout, so that children write to the log, too
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
    """Append the modification time of the log to its index."""
    with closing(LogTimes(path)) as times:
        times.look()
