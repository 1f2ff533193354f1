"""When to save: the interval of `checkpoint_interval: auto`, and the last save before the deadline of a stop.

Only rank 0 measures the times of saves and batches, and decides. It broadcasts its decisions at looks: batches that all
ranks know in advance, so that the batches in between need no collective. Rank 0 plans the next look for the batch at
which the save will be due.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum

from hpc_det.checkpoint.committed import Committed
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import count
from hpc_det.plan.checkpoint_interval import (
    UNMEASURED_STALL_S,
    best_interval_s,
    grace_is_too_short,
    has_lost_work,
    mean_time_s,
)
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.store.save_times import Save, after_save, read_saves, write_save

POSTPONED_S = 0.5
"""Seconds between two looks while a save is due and may be postponed."""


class LastSave(Enum):
    """The save for which a stop request leaves time."""

    AFTER_THE_ONE_IN_FLIGHT = "after the one in flight"
    """A new save, after the one in flight if there is one."""
    INSTEAD = "instead"
    """A new save; the one in flight is cancelled."""
    NONE = "none"
    """No new save; the one in flight continues."""


class SaveSchedule:
    """The schedule of saves in one attempt.

    All ranks call its methods at the same batches, except `trained` and `save_committed`.
    """

    def __init__(
        self,
        trial: TrialFolder,
        distributed: Distributed,
        *,
        auto: bool = False,
        grace_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`auto`: whether `checkpoint_interval` is auto. `clock` returns seconds since the epoch.

        `grace_s`: seconds between the notice of a preemption and its kill; None: unknown. Only the arguments of rank 0
        have an effect.
        """
        self.next_look = math.inf
        """Number of batches at which `is_due` is a collective again; infinity: never."""
        self._trial = trial
        self._distributed = distributed
        self._grace_s = grace_s
        self._clock = clock
        chief = distributed.is_chief
        self._times = read_saves(trial.saves) if chief else None
        self._events = Journal(trial.journal).events() if chief else []
        self._auto = auto
        self._has_lost_work = has_lost_work(self._events)
        self._batches, self._batches_s = 0, 0.0
        self._newest: int | None = None
        """Batches in the newest checkpoint."""
        self._since = self._began = self._committed = clock()
        """By `clock`: when training continued after the last save, and the beginning and the commit of that save."""
        self._said_s = 0.0
        """The interval that was printed last, in seconds."""
        self._postponed = False

    def begin(self, steps: int) -> None:
        """Start the schedule: training begins, and `steps` batches are already saved."""
        self._since, self._newest = self._clock(), steps or None
        self._plan_look(steps)

    def leave_to_period(self) -> None:
        """Ignore `checkpoint_interval: auto`, since the script sets a period; save in between only if work may be lost.

        That is the case if an attempt ended before a save, or if the grace time is too short for one.
        """
        self._auto = False

    def trained(self, batches: int, seconds: float) -> None:
        """Count `batches` that took `seconds` together."""
        self._batches += batches
        self._batches_s += seconds

    def is_due(self, steps: int) -> bool:
        """Return whether to save now for `checkpoint_interval: auto`; False before `next_look`."""
        if steps < self.next_look:
            return False
        due: bool = self._distributed.broadcast_json(self._distributed.is_chief and self._is_time())
        self._plan_look(steps, was_due=due)
        return due

    def last_save(self, deadline: float | None, *, in_flight: bool) -> LastSave:
        """Return the save for which a stop leaves time; print the reason for LastSave.NONE.

        `deadline`: when all ranks will be killed, in seconds since the epoch; None: unknown. `in_flight`: whether a
        save is in flight. It is finished first, since it may be a checkpoint that retention keeps, unless this leaves
        too little time for the new one. With too little time for any save, a save is tried only if none is in flight,
        and there is no checkpoint yet or more work would be lost than between two periodic saves.
        """
        answer = self._last_save(deadline, in_flight).value if self._distributed.is_chief else None
        return LastSave(self._distributed.broadcast_json(answer))

    # --- around a save

    def save_begins(self, *, postponed: bool = False) -> None:
        """Note the beginning of a save. `postponed`: it was due at an earlier batch."""
        self._began = self._clock()
        self._postponed = postponed

    def training_goes_on(self) -> None:
        """Note that training continues, so the stall of the save has ended."""
        self._since = self._clock()

    def save_committed(self) -> None:
        """Note the commit of the save. The thread that commits may call this."""
        self._committed = self._clock()

    def save_ends(self, steps: int, checkpoint: Committed | None) -> None:
        """Record a save that is settled, and plan the next one.

        `steps`: batches trained by now. `checkpoint`: the one that rank 0 committed; None: none, or another rank.
        """
        if checkpoint:
            self._newest = checkpoint.steps
            save = Save(
                batches=checkpoint.steps,
                began=self._began,
                committed_s=self._committed - self._began,
                stall_s=self._since - self._began,
                size_bytes=checkpoint.size_bytes,
                batch_s=self._batches_s / self._batches if self._batches else None,
                postponed=self._postponed,
            )
            self._times = after_save(self._times, save)
            write_save(self._trial.saves, save)
        self._plan_look(steps)

    # --- rank 0

    def _plan_look(self, steps: int, *, was_due: bool = False) -> None:
        """Choose the next look on rank 0, and broadcast it.

        `was_due`: a save is due now. If it is postponed, the next look must come soon; if not, `save_ends` plans the
        next look again.
        """
        look = self._distributed.broadcast_json(self._look(steps, was_due) if self._distributed.is_chief else None)
        self.next_look = math.inf if look is None else look

    def _look(self, steps: int, was_due: bool) -> int | None:
        """Return the number of batches at the next look, or None if none is needed."""
        if not (self._auto or self._has_lost_work or grace_is_too_short(self._grace_s, self._times)):
            return None
        if not self._batches_s:
            return steps + 1
        left_s = POSTPONED_S if was_due else self._left_s()
        left = math.ceil(left_s * self._batches / self._batches_s)
        # The first batches may be slow. So a look comes after no more batches than were measured so far, and uses their
        # new mean time.
        return steps + max(1, min(left, self._batches))

    def _is_time(self) -> bool:
        if self._left_s() > 0:
            return False
        self._say()
        return True

    def _interval_s(self) -> float:
        """Return the seconds of training between two saves."""
        best_s = best_interval_s(self._stall_s(), mean_time_s(self._events, self._clock()))
        # at least the time of a whole save: only one can be in flight
        return max(best_s, self._times.mean_s if self._times else 0)

    def _stall_s(self) -> float:
        return self._times.stall_s if self._times else UNMEASURED_STALL_S

    def _left_s(self) -> float:
        """Return the seconds until a save is due; 0 or less: now."""
        return self._since + self._interval_s() - self._clock()

    def _last_save(self, deadline: float | None, in_flight: bool) -> LastSave:
        if deadline is None or self._times is None:  # unknown whether there is time: try it
            return LastSave.AFTER_THE_ONE_IN_FLIGHT
        now, takes_s = self._clock(), self._times.mean_s
        left_s, lost_s = deadline - now, now - self._since
        if takes_s + (max(self._began + takes_s - now, 0) if in_flight else 0) <= left_s:
            return LastSave.AFTER_THE_ONE_IN_FLIGHT
        if takes_s <= left_s:  # time for one of both: the newer one saves more work
            return LastSave.INSTEAD
        if not in_flight and (self._newest is None or lost_s > self._interval_s()):
            return LastSave.AFTER_THE_ONE_IN_FLIGHT  # worth a try: the save may be faster than the mean
        at = count(self._newest or 0, "batch")  # a run without checkpoints has not come here
        newest = "the save in flight" if in_flight else f"the checkpoint at {at}"
        print(
            f"hpc-det: stopping without a save: a save takes {takes_s:.3g} s, and the job ends in {left_s:.3g} s; "
            f"{newest} is {lost_s:.3g} s old",
            flush=True,
        )
        return LastSave.NONE

    def _say(self) -> None:
        """Print the interval for the first time, and when it has changed by a factor of 1.5 since it was printed."""
        interval_s = self._interval_s()
        if self._said_s / 1.5 < interval_s < self._said_s * 1.5:
            return
        self._said_s = interval_s
        measured = "measured" if self._times else "an estimate"
        print(
            f"hpc-det: checkpoint_interval auto{self._why()}: a save every {interval_s:.3g} s minimises the expected "
            f"lost time, if a save stalls training for {self._stall_s():.2g} s ({measured}) and an interruption comes "
            f"every {mean_time_s(self._events, self._clock()):.3g} s",
            flush=True,
        )

    def _why(self) -> str:
        if self._grace_s is not None and grace_is_too_short(self._grace_s, self._times):
            return f", since the grace time of {self._grace_s:g} s is too short for a save"
        return ", since an attempt ended without a save" if self._has_lost_work else ""
