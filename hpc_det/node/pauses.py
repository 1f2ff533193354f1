"""How long this process did not run: it was stopped with its suspended job, or frozen with its machine."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pauses:
    """For processes that look regularly. The monotonic clock goes on while a process is stopped (clock_gettime(2))."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`every_s`: the longest time between two looks of a process that runs."""
        self._longest_s = 3 * every_s
        self._clock = clock
        self._looked = clock()

    def look(self) -> float:
        """Seconds since the last look if they were too many for a process that ran, else 0."""
        now = self._clock()
        since, self._looked = now - self._looked, now
        return since if since > self._longest_s else 0.0
