"""Reads the last lines of logs, often the only information about a program that has failed, and watches logs grow.

`LogWatch` records the times at which each log grew in a file beside it, so that the logs of all ranks can be merged by
time.
"""

from __future__ import annotations

import math
import re
import selectors
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

from hpc_det.node.files import make_folder
from hpc_det.node.folder_watch import FolderWatch
from hpc_det.node.process import signal_name
from hpc_det.store.log_lines import LogTimes

LONGEST_SEARCH, LONGEST_LINE = 131072, 200
"""Bytes at the end of a log that are searched for the cause of a failure, and the most characters of a line in a
message.

torchrun's report has 300 bytes for each rank of the node, and the exception is above it.
"""
LOOK_S = 0.2
"""Shortest time in seconds between two looks at a log.

On NFS, a look also makes this node send what its ranks have written to the server, so that other nodes see it.
"""
LONGEST_PAUSE_S = 1.0
"""Without inotify: longest pause in seconds between two looks while no log grows; the time recorded is still that of
the last write.
"""


def size_of(log: Path) -> int:
    """Return the size of a log in bytes; 0 before it exists."""
    return log.stat().st_size if log.exists() else 0


def last_line(log: Path, begin: int) -> str:
    """Return the line written to the log from byte `begin` on that names the cause of a failure best, or "".

    See `cause_line`.
    """
    from hpc_det.launch.printed_causes import cause_line

    return shortened(cause_line(written_since(log, begin)))


def shortened(line: str) -> str:
    """Return the line with at most LONGEST_LINE characters, of both its ends."""
    if len(line) <= LONGEST_LINE:
        return line
    half = LONGEST_LINE // 2 - 2
    return f"{line[:half]}...{line[-half:]}"


def written_since(log: Path, begin: int) -> str:
    """Return the text written to the log from byte `begin` on, at most the last LONGEST_SEARCH bytes."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, size_of(log) - LONGEST_SEARCH))
        return file.read().decode(errors="replace")


_NO_MODULE = re.compile(r"No module named '?([\w.]+)")


def how_it_ended(code: int, log: Path, begin: int, killer: str = "", programs: str = "") -> str:
    """Return how a process ended, with the line that names the cause, the rank that a launcher reports, and the log.

    `code`: as subprocess returns it, below 0 for a signal. `killer`: what is known about the sender of a SIGKILL.
    `programs`: which programs it ran, of which one may have been killed.
    """
    from hpc_det.launch.printed_causes import failed_rank

    last_printed, reported = last_line(log, begin), failed_rank(written_since(log, begin))
    said = f" after {last_printed!r}" if last_printed else ""
    by_rank = f"; {reported.sentence()}" if reported else ""
    ran = "" if reported else programs
    by = "; ".join(filter(None, [ran, killer])) if is_kill(code) or (reported and is_kill(reported.code)) else ""
    return f"{exit_of(code)}{said}{by_rank}{by and f'; {by}'}; see {log}{_remedy(code, last_printed)}"


def is_kill(code: int) -> bool:
    """Return whether the exit code means a SIGKILL, of a process or, for a shell, of its command."""
    return SIGKILL in (-code, code - 128)


def exit_of(code: int) -> str:
    """Return the exit code, or the signal; both for a shell whose command a signal has ended (sh(1))."""
    if code < 0:
        return f"ended by signal {signal_name(-code)} (killed or crashed)"
    if code > 128 and code - 128 in set(signal.Signals):
        return f"exit code {code} (signal {signal_name(code - 128)} ended its program)"
    return f"exit code {code}"


def _remedy(code: int, last_printed: str) -> str:
    """Return what to do about a program or Python module that the node does not have; "" for any other end."""
    if code == 127:  # exit status of a shell that does not find a command
        return "; the node has no such program: correct the entrypoint, or install it there"
    if found := _NO_MODULE.search(last_printed):
        return f"; install the package of {found[1]} for the Python of the entrypoint, or put its file into context_dir"
    return ""


class LogWatch:
    """Records when each of several logs grows from now on.

    It looks at a log after the kernel has reported a write to it; where the kernel cannot, at all logs regularly.
    """

    def __init__(self, logs: Iterable[Path], selector: selectors.BaseSelector) -> None:
        """Create the folders of `logs`, which need not exist yet. `selector`: is woken by a write to a log."""
        self._times = {log: LogTimes(log) for log in logs}
        self._selector = selector
        self._writes = _folder_watch(self._times)
        self._pause_s = LOOK_S
        self._looked_at = -math.inf
        self._next_look = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds until the next look is due; infinity if a write has to come first."""
        return max(self._next_look - time.monotonic(), 0)

    def poll(self) -> None:
        """Look at the logs if a look is due."""
        if self.pause_s:
            return
        if self._look():
            self._pause_s = LOOK_S
        elif self._writes:
            self._pause_s = math.inf
            self._selector.register(self._writes.fd, selectors.EVENT_READ, self._on_write)
        else:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._looked_at = time.monotonic()
        self._next_look = self._looked_at + self._pause_s

    def close(self) -> None:
        """Look a last time, at what the ranks wrote before they exited, and close the records."""
        self._look()
        for times in self._times.values():
            times.close()
        if self._writes:
            self._ignore_writes()
            self._writes.close()

    def _on_write(self) -> None:
        self._ignore_writes()  # else each line of a rank that goes on printing would wake this process
        self._next_look = self._looked_at + LOOK_S

    def _ignore_writes(self) -> None:
        assert self._writes
        with suppress(KeyError):  # it waits for the next look
            self._selector.unregister(self._writes.fd)

    def _look(self) -> bool:
        """Return whether a log has grown since the last look."""
        written = self._writes.written() if self._writes else None
        due = self._times.keys() if written is None else written & self._times.keys()
        grown = [self._times[log].look() for log in due]
        return any(grown)


def _folder_watch(logs: Iterable[Path]) -> FolderWatch | None:
    """Create the folders of the logs, and return a watch of them; None if that fails, as at the limit of watches."""
    folders = dict.fromkeys(log.parent for log in logs)
    with suppress(OSError):
        for folder in folders:
            make_folder(folder)
        return FolderWatch(folders)
    return None
