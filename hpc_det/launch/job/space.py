"""How a job waits after a disk was full: pauses that grow, until the next checkpoint fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.staging import clear_leftovers
from hpc_det.node import full_disk
from hpc_det.requeue import AttemptEnd, Cause
from hpc_det.store.log_lines import say

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


class Space:
    """On the file system of one trial's checkpoints."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._pauses = 0
        """Since there was space last."""
        self._steps = 0
        self.is_wanted = False
        """Whether a full disk has ended the last attempt."""

    def note(self, end: AttemptEnd) -> None:
        """An attempt has ended."""
        self.is_wanted = end.cause is Cause.DISK_FULL
        if not self.is_wanted or end.steps > self._steps:
            self._pauses = 0
        self._steps = end.steps

    def comes(self, rests: Callable[[float, Callable[[], bool]], bool], is_over: Callable[[], bool]) -> bool:
        """Wait at least one pause, and until there is as much space as the newest checkpoint takes, or it `is_over`.

        `rests` waits so many seconds. False where it says that the job has to leave. No rank may be alive.
        """
        clear_leftovers(self._checkpoints)
        needed = next((checkpoint.size_bytes for checkpoint in committed(self._checkpoints)), 0)
        while True:
            pause_s = self._next_pause_s()
            free = full_disk.free_bytes(self._checkpoints)
            told = "" if free is None else f"; {full_disk.in_words(free)} free"
            say(f"waits {pause_s:.0f} s for space in {self._checkpoints}: {full_disk.in_words(needed)} needed{told}")
            if not rests(pause_s, is_over):
                return False
            free = full_disk.free_bytes(self._checkpoints)
            if free is None or free >= needed or is_over():
                return True

    def next_pause_s(self, error: OSError) -> float:
        """Before a file of the job is written again."""
        pause_s = self._next_pause_s()
        say(f"writes again in {pause_s:.0f} s: {full_disk.sentence(error)}")
        return pause_s

    def _next_pause_s(self) -> float:
        self._pauses += 1
        return min(FIRST_PAUSE_S * 2.0 ** (self._pauses - 1), LONGEST_PAUSE_S)
