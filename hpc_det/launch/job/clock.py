"""The job's own clock: when the ranks must be told of a time limit, so that their save ends before it.

PBS gives no warning at all before a walltime. Slurm's comes `signal_lead_s` before it, which a long save may outlast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
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


def ring_at(ends_at: float, signal_lead_s: float, times: SaveTimes | None) -> float:
    """When to tell the ranks, for a job that ends then; both in seconds since the epoch.

    `signal_lead_s` is the guess where no save of the trial was measured.
    """
    if times is None:
        return ends_at - MARGIN_S - signal_lead_s
    return ends_at - MARGIN_S - NOTICE_S - NOTICE_BATCHES * (times.batch_s or 0.0) - SLOWER * times.longest_s


def end_of_grace(plan: JobPlan, signal: str = "SIGTERM") -> float | None:
    """When a job that hears this signal now will be gone, where anybody knows. Only TERM begins a grace time."""
    if plan.grace_time_s is None or signal != "SIGTERM":
        return None
    return time.time() + plan.grace_time_s


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
