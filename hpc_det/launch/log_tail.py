"""Reads the last lines of logs, often the only information about a program that has failed, and watches logs grow.

`LogWatch` records the times at which each log grew in a file beside it, so that the logs of all ranks can be merged by
time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

from hpc_det.node.process import signal_name
from hpc_det.store.log_lines import LogTimes

LONGEST_SEARCH, LONGEST_LINE = 16384, 200
"""Bytes at the end of a log that are searched for its last line, and the most characters of that line in a message."""
_ERROR = re.compile(r"[\w.]+(?:Error|Exception|Interrupt): \S")
"""Matches the last line of a Python traceback."""
LOOK_S = 0.2
"""Seconds between two polls while logs grow.

An agent takes 0.15 % of a core while all of 8 ranks print, 0.03 % while none does, and 0.02 % without these polls
(measured). On NFS, a poll also makes this node send what its ranks have written to the server, so that other nodes see
it.
"""
LONGEST_PAUSE_S = 1.0
"""Longest pause in seconds between two polls while no log grows; the time recorded is still that of the last write."""


def size_of(log: Path) -> int:
    """Return the size of a log in bytes; 0 before it exists."""
    return log.stat().st_size if log.exists() else 0


def last_line(log: Path, begin: int) -> str:
    """Return the last line written to the log from byte `begin` on, or ""."""
    lines = [line.strip() for line in written_since(log, begin).split("\n") if line.strip()]
    # torchrun ends with a framed report that does not contain the reason of a rank's failure.
    if lines and not re.search(r"\w", lines[-1]):
        lines = [line for line in lines if _ERROR.match(line)] or lines
    return lines[-1][-LONGEST_LINE:] if lines else ""


def written_since(log: Path, begin: int) -> str:
    """Return the text written to the log from byte `begin` on, at most the last LONGEST_SEARCH bytes."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, size_of(log) - LONGEST_SEARCH))
        return file.read().decode(errors="replace")


_NO_MODULE = re.compile(r"No module named '?([\w.]+)")


def how_it_ended(code: int, log: Path, begin: int) -> str:
    """Return how a process ended, with its last line and its log. `code`: as subprocess returns it, below 0 for a
    signal.
    """
    how = f"ended by signal {signal_name(-code)} (killed or crashed)" if code < 0 else f"exit code {code}"
    last_printed = last_line(log, begin)
    said = f" after {last_printed!r}" if last_printed else ""
    return f"{how}{said}; see {log}{_remedy(code, last_printed)}"


def _remedy(code: int, last_printed: str) -> str:
    """Return what to do about a program or Python module that the node does not have; "" for any other end."""
    if code == 127:  # exit status of a shell that does not find a command
        return "; the node has no such program: correct the entrypoint, or install it there"
    if found := _NO_MODULE.search(last_printed):
        return f"; install the package of {found[1]} for the Python of the entrypoint, or put its file into context_dir"
    return ""


class LogWatch:
    """Records when each of several logs grows."""

    def __init__(self, logs: Iterable[Path]) -> None:
        """`logs` need not exist yet."""
        self._times = [LogTimes(log) for log in logs]
        self._pause_s = LOOK_S
        self._next_look = 0.0

    @property
    def pause_s(self) -> float:
        """Seconds until the next look is due."""
        return max(self._next_look - time.monotonic(), 0)

    def poll(self) -> None:
        """Look at the logs if a look is due."""
        if not self.pause_s:
            has_grown = self._look()
            self._pause_s = LOOK_S if has_grown else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._next_look = time.monotonic() + self._pause_s

    def close(self) -> None:
        """Look a last time, at what the ranks wrote before they exited, and close the records."""
        self._look()
        for times in self._times:
            times.close()

    def _look(self) -> bool:
        """Return whether a log has grown since the last look."""
        grown = [times.look() for times in self._times]
        return any(grown)
