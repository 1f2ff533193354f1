"""When the logs of a node's ranks grow: noted beside them, for those who read them merged by time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from hpc_det.store.log_lines import LogTimes

LOOK_S = 0.2
"""Between two looks while logs grow. An agent takes 0.15 % of a core while all of 8 ranks print, and 0.03 % while none
does, instead of 0.02 % (measured). On NFS, a look also sends what the ranks have written: other nodes see it.
"""
LONGEST_PAUSE_S = 1.0
"""Between two looks as long as nothing grows. The time that is noted then is still that of the last write."""


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
