"""A clock for time limits that stands still while this process does: stopped with its suspended job, or frozen with its
machine. The monotonic clock goes on then (clock_gettime(2)).
"""

from __future__ import annotations

import time


class AwakeClock:
    """Counts the seconds since it was made. Look regularly: a stop shows as a long time between two looks."""

    def __init__(self, every_s: float = 1.0) -> None:
        """`every_s`: the longest time between two looks of a process that runs.

        Where it took more than three times as long, the process was stopped, and `every_s` counts as time it ran.
        """
        self._every_s = every_s
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self) -> float:
        """For which the process ran."""
        self.stopped_s()
        return self._seconds

    def stopped_s(self) -> float:
        """Seconds for which the process was stopped since the last look; 0 where it ran."""
        now = time.monotonic()
        since, self._looked_at = now - self._looked_at, now
        stopped = since - self._every_s if since > 3 * self._every_s else 0.0
        self._seconds += since - stopped
        return stopped
