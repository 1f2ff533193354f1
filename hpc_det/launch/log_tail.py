"""Reads the last lines of logs, often the only information about a program that has failed, and watches logs grow.

`LogWatch` records the times at which each log grew in a file beside it, so that the logs of all ranks can be merged by
time.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from signal import SIGKILL

from hpc_det.node.process import signal_name
from hpc_det.store.log_lines import LogTimes

LONGEST_SEARCH, LONGEST_LINE = 131072, 200
"""Bytes at the end of a log that are searched for the cause of a failure, and the most characters of a line in a
message.

torchrun's report has 300 bytes for each rank of the node, and the exception is above it.
"""
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
