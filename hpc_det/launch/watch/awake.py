"""A clock for time limits that stands still while this process does."""

from __future__ import annotations

import time

LONGEST_PAUSE_S = 5.0


class AwakeClock:
    """Counts the time since it was made, looked at every second or so.

    A longer pause between two looks counts as LONGEST_PAUSE_S: the process was suspended then, most often with the
    whole job, or the machine stood still, and others had no time either.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._looked_at, LONGEST_PAUSE_S)
        self._looked_at = now
        return self._seconds
