"""The limits that a job observes for its trial: its time, and the free space for checkpoints.

The job's clock determines when to request a stop from the ranks, so that their save ends before the time limit. PBS
gives no warning before a walltime. Slurm's warning comes `signal_lead_s` before it, which may be less than a save
takes. After a full disk the job waits with growing pauses until the next checkpoint fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpc_det.node import full_disk
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.requeue import AttemptEnd, Cause
from hpc_det.store.log_lines import say
from hpc_det.store.save_times import SaveTimes, read_saves

MARGIN_S = 10.0
"""Seconds reserved after the save, for the ranks to exit and the job to be requeued."""
NOTICE_S = 32.0
"""Seconds from the stop request in the run folder until the ranks receive it.

Agents look every second, but NFS may hide a new file for as long as it caches the folder's attributes, by default 30 s
or more (nfs(5), acdirmin).
"""
NOTICE_BATCHES = 4
"""Batches from the receipt of the stop request to the one at which all ranks stop (hpc_det.distributed.preempt)."""
SLOWER = 1.5
"""The next save is assumed to take at most this many times as long as the longest measured one."""
READ_EVERY_S = 5.0
"""Seconds between two readings of the save times, which may change, and between two checks for a suspension."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
"""Seconds between two checks for space on the disk: the first pause, which then doubles, and the longest one."""


def ring_at(ends_at: float, signal_lead_s: float, times: SaveTimes | None) -> float:
    """Return when to request a stop, in seconds since the epoch, for a job that ends at `ends_at`.

    `times`: the save times measured for the trial; None: assume that a save takes `signal_lead_s`.
    """
    if times is None:
        return ends_at - MARGIN_S - signal_lead_s
    return ends_at - MARGIN_S - NOTICE_S - NOTICE_BATCHES * (times.batch_s or 0.0) - SLOWER * times.longest_s


class JobClock:
    """Determines when to request a stop because of the time limit; it rings once."""

    def __init__(
        self, ends_at: float | None, plan: JobPlan, saves: Path, clock: Callable[[], float] = time.time
    ) -> None:
        """`ends_at`: the job's time limit in seconds since the epoch, by `clock`; None: the clock never rings."""
        self.ends_at = ends_at
        self._signal_lead_s = plan.signal_lead_s
        self._saves = saves
        self._clock = clock
        self._has_rung = False
        self._awake = AwakeClock(READ_EVERY_S)

    def next_ring(self) -> float | None:
        """Return when the clock rings according to the measured save times; None if it does not ring any more."""
        if self.ends_at is None or self._has_rung:
            return None
        return ring_at(self.ends_at, self._signal_lead_s, read_saves(self._saves))

    def timeout_s(self) -> float | None:
        """Return the seconds until `rings` should be called next; None: never."""
        ring = self.next_ring()
        return None if ring is None else min(max(ring - self._clock(), 0.0), READ_EVERY_S)

    def rings(self) -> bool:
        """Return True once, when it is time to request a stop. Must be called every `READ_EVERY_S`."""
        if self.ends_at is not None:
            # Schedulers do not count the time for which they suspend a job.
            self.ends_at += self._awake.stopped_s()
        ring = self.next_ring()
        self._has_rung = self._has_rung or (ring is not None and self._clock() >= ring)
        return ring is not None and self._has_rung


class Space:
    """Waits for space on the file system of one trial's checkpoints."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._pauses = 0
        """Number of pauses since there last was space."""
        self._steps = 0
        """Batches in the newest checkpoint at the end of the last attempt."""
        self.is_wanted = False
        """True if a full disk has ended the last attempt."""

    def note(self, end: AttemptEnd) -> None:
        """Record the end of an attempt."""
        self.is_wanted = end.cause is Cause.DISK_FULL
        if not self.is_wanted or end.steps > self._steps:
            self._pauses = 0
        self._steps = end.steps

    def comes(self, rests: Callable[[float, Callable[[], bool]], bool], is_over: Callable[[], bool]) -> bool:
        """Wait until the newest checkpoint would fit again, or `is_over`; return False if the job has to exit.

        `rests` waits for a number of seconds and returns False if the job has to exit. It is called at least once. No
        rank may be running.
        """
        from hpc_det.checkpoint.committed import committed  # before the ranks start, no job needs these modules
        from hpc_det.checkpoint.staging import clear_leftovers

        # Half-written checkpoints of dead ranks take space, too.
        clear_leftovers(self._checkpoints)
        needed = next((checkpoint.size_bytes for checkpoint in committed(self._checkpoints)), 0)
        while True:
            pause_s = self._next_pause_s()
            free = full_disk.free_bytes(self._checkpoints)
            rest = "" if free is None else f"; {full_disk.in_words(free)} free"
            say(f"waiting {pause_s:.0f} s for space in {self._checkpoints}: {full_disk.in_words(needed)} needed{rest}")
            if not rests(pause_s, is_over):
                return False
            free = full_disk.free_bytes(self._checkpoints)
            if free is None or free >= needed or is_over():
                return True

    def next_pause_s(self, error: OSError) -> float:
        """Return the seconds to wait before a file of the job is written again, and log them."""
        pause_s = self._next_pause_s()
        say(f"retrying a write in {pause_s:.0f} s: {full_disk.sentence(error)}")
        return pause_s

    def _next_pause_s(self) -> float:
        self._pauses += 1
        return min(FIRST_PAUSE_S * 2.0 ** (self._pauses - 1), LONGEST_PAUSE_S)
