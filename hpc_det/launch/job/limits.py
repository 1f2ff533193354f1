"""The limits that a job keeps for its trial: its time, and the space on the disk of the checkpoints.

Its clock says when the ranks must be told of a time limit, so that their save ends before it: PBS gives no warning at
all before a walltime, and Slurm's comes `signal_lead_s` before it, which a long save may outlast. After a disk was full
the job waits with growing pauses, until the next checkpoint fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.staging import clear_leftovers
from hpc_det.node import full_disk
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import AttemptEnd, Cause
from hpc_det.store.log_lines import say
from hpc_det.store.save_times import SaveTimes, read_saves

MARGIN_S = 10.0
"""After the save, for the ranks to leave and the job to go back into the queue."""
NOTICE_S = 32.0
"""From the request in the run folder to the ranks: agents look each second, and NFS may hide a new file for as long as
it keeps a folder's attributes, 30 s (nfs(5), acdirmin).
"""
NOTICE_BATCHES = 4
"""From there to the batch at which all ranks leave (hpc_det.distributed.preempt)."""
SLOWER = 1.5
"""A save may take so many times as long as the longest one until now."""
READ_EVERY_S = 5.0
"""Saves are measured while the clock runs, and the job may be suspended."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


def ring_at(ends_at: float, signal_lead_s: float, times: SaveTimes | None) -> float:
    """When to tell the ranks, for a job that ends then; both in seconds since the epoch.

    `signal_lead_s` is the guess where no save of the trial was measured.
    """
    if times is None:
        return ends_at - MARGIN_S - signal_lead_s
    return ends_at - MARGIN_S - NOTICE_S - NOTICE_BATCHES * (times.batch_s or 0.0) - SLOWER * times.longest_s


class JobClock:
    """Rings once."""

    def __init__(
        self, ends_at: float | None, plan: JobPlan, saves: Path, clock: Callable[[], float] = time.time
    ) -> None:
        """`ends_at`: when the job is out of time, in seconds since the epoch, as `clock`; None: it never rings."""
        self.ends_at = ends_at
        self._signal_lead_s = plan.signal_lead_s
        self._saves = saves
        self._clock = clock
        self._has_rung = False
        self._awake = AwakeClock(READ_EVERY_S)

    def next_ring(self) -> float | None:
        """By what is measured until now; None: never more."""
        if self.ends_at is None or self._has_rung:
            return None
        return ring_at(self.ends_at, self._signal_lead_s, read_saves(self._saves))

    def timeout_s(self) -> float | None:
        """How long to wait before the next look at `rings`; None: for ever."""
        ring = self.next_ring()
        return None if ring is None else min(max(ring - self._clock(), 0.0), READ_EVERY_S)

    def rings(self) -> bool:
        """Whether it is time to tell the ranks, and they were not told. Schedulers do not count the time for which they
        suspend a job. Asked every `READ_EVERY_S`.
        """
        if self.ends_at is not None:
            self.ends_at += self._awake.stopped_s()
        ring = self.next_ring()
        self._has_rung = self._has_rung or (ring is not None and self._clock() >= ring)
        return ring is not None and self._has_rung


class Space:
    """How the job waits for space on the file system of one trial's checkpoints."""

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
