"""The lines that a driver logs while it waits for a queue, for agents or for ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

REPORT_S = 10.0
"""Seconds between two lines."""
# A warning, because Python shows no lower level unless the program configures logging.
_log = logging.getLogger("hpc_det.sgd")


class WaitReport:
    """Logs one line every REPORT_S seconds while something is awaited."""

    def __init__(self, state: Callable[[], str]) -> None:
        """`state`: returns what is awaited, and its state; called for each line."""
        self._state = state
        self._began = time.monotonic()
        self._next = self._began + REPORT_S

    def look(self) -> None:
        """Log a line if it is time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_S
            _log.warning("waiting for %.0f s: %s", now - self._began, self._state())
