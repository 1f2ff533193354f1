"""Logs of ranks while they grow, and their end: often all that is known of a program that has failed.

When a log grows is noted beside it, for those who read the logs of all ranks merged by time.
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
"""How Python's tracebacks end."""
LOOK_S = 0.2
"""Between two looks while logs grow. An agent takes 0.15 % of a core while all of 8 ranks print, and 0.03 % while none
does, instead of 0.02 % (measured). On NFS, a look also sends what the ranks have written: other nodes see it.
"""
LONGEST_PAUSE_S = 1.0
"""Between two looks as long as nothing grows. The time that is noted then is still that of the last write."""


def size_of(log: Path) -> int:
    """In bytes; 0 before it exists."""
    return log.stat().st_size if log.exists() else 0


def last_line(log: Path, begin: int) -> str:
    """Of what was written to the log from `begin` on; where nothing was, it is empty."""
    lines = [line.strip() for line in written_since(log, begin).split("\n") if line.strip()]
    if lines and not re.search(r"\w", lines[-1]):  # torchrun's report in its frame, which does not say why ranks failed
        lines = [line for line in lines if _ERROR.match(line)] or lines
    return lines[-1][-LONGEST_LINE:] if lines else ""


def written_since(log: Path, begin: int) -> str:
    """The end of it, where it is long."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(begin, size_of(log) - LONGEST_SEARCH))
        return file.read().decode(errors="replace")


def how_it_ended(code: int, log: Path, begin: int) -> str:
    """Return how a process failed, its last line, and its log; `code` as subprocess gives it, below 0 for a signal."""
    how = f"ended by signal {signal_name(-code)} (killed or crashed)" if code < 0 else f"exit code {code}"
    last_printed = last_line(log, begin)
    said = f" after {last_printed!r}" if last_printed else ""
    return f"{how}{said}; see {log}"


class LogWatch:
    def __init__(self, logs: Iterable[Path]) -> None:
        """Logs that may come later."""
        self._times = [LogTimes(log) for log in logs]
        self._pause_s = LOOK_S
        self._next_look = 0.0

    @property
    def pause_s(self) -> float:
        """Until a look is due."""
        return max(self._next_look - time.monotonic(), 0)

    def poll(self) -> None:
        """Look, if that is due."""
        if not self.pause_s:
            has_grown = self._look()
            self._pause_s = LOOK_S if has_grown else min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._next_look = time.monotonic() + self._pause_s

    def close(self) -> None:
        """With a look at what the ranks said last."""
        self._look()
        for times in self._times:
            times.close()

    def _look(self) -> bool:
        """Whether any has grown."""
        grown = [times.look() for times in self._times]
        return any(grown)
