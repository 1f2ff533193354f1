"""The live progress of a trial: the batches that rank 0 has trained, from its heartbeat, in a file for commands.

Reports of training are `scheduling_unit` batches apart, which may take an hour.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from hpc_det.node.frames import Head
from hpc_det.node.json_files import write_json
from hpc_det.store.folders import TrialFolder

PROGRESS_S = 20.0
"""Seconds between two questions to rank 0, and at least between two writes of the file."""


class LiveProgress:
    """Writes the progress of one attempt; used by the agent of node 0, where rank 0 runs."""

    def __init__(self, trial: TrialFolder, attempt: int) -> None:
        self._trial = trial
        self._attempt = attempt
        self._batches = self._written = 0
        self._next_s = 0.0
        """Seconds on the caller's clock when rank 0 is asked again."""

    def take(self, news: Iterable[Head]) -> None:
        """Record the messages of heartbeats."""
        for message in news:
            # In other phases the number is that of a batch of a validation, or of the last loop.
            if message["heartbeat"] == 0 and message["phase"] == "training":
                self._batches = message["batch"]

    def is_due(self, now: float) -> bool:
        """Write the file if there is something new, and return whether to ask rank 0. `now`: seconds on any clock."""
        if now < self._next_s:
            return False
        self._next_s = now + PROGRESS_S
        if self._batches != self._written and not self._has_new_report():
            self._written = self._batches
            content = {"attempt": self._attempt, "batches": self._batches, "time": time.time()}
            with suppress(OSError):  # such as a full disk; commands show the last report then
                write_json(self._trial.live_progress, content)
        return True

    def _has_new_report(self) -> bool:
        """Return whether rank 0 has reported since the last question, so that this file would show nothing newer."""
        with suppress(OSError):
            return time.time() - self._trial.metrics.stat().st_mtime < PROGRESS_S / 2
        return False
