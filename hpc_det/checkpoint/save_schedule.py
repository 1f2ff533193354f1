"""When to save: measured saves and batches, `checkpoint_interval: auto`, the deadline of a stop.

Rank 0 knows the times and decides. The others hear of it at looks: batches that all of them know beforehand, so that no
step has a collective. A look comes when the save is due by the time that batches take, and never after more than twice
as many batches as were measured so far: where the first ones were slow, the later looks know better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum

from hpc_det.checkpoint.committed import Committed
from hpc_det.distributed.collectives import Distributed
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
"""Between two looks."""


class LastSave(Enum):
    """What a stop leaves time for."""

    AFTER_THE_ONE_IN_FLIGHT = "after the one in flight"
    """Or at once, where none is."""
    INSTEAD = "instead"
    NONE = "none"
    """But the one in flight."""


class SaveSchedule:
    """Of one attempt. All methods but `trained` are collective, or called by all ranks at the same batch."""

    def __init__(
        self,
        trial: TrialFolder,
        distributed: Distributed,
        *,
        auto: bool = False,
        grace_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`auto`: whether `checkpoint_interval` says so. `grace_s`: what a preemption gives, where it is known.

        What rank 0 is told counts. `clock`: seconds since the epoch.
        """
        self.next_look = math.inf
        """The number of batches after which `is_due` is a collective next."""
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
        """When the work began that the last save lacks; when that save did, and was committed."""
        self._said_s = 0.0
        self._postponed = False

    def begin(self, steps: int) -> None:
        """Training begins after `steps` batches, which are saved."""
        self._since, self._newest = self._clock(), steps or None
        self._plan_look(steps)

    def leave_to_period(self) -> None:
        """A script says how often to save: `checkpoint_interval` adds nothing, unless work would be lost."""
        self._auto = False

    def trained(self, batches: int, seconds: float) -> None:
        self._batches += batches
        self._batches_s += seconds

    def is_due(self, steps: int) -> bool:
        """Whether to save for `checkpoint_interval: auto`; at batches that are no look, never."""
        if steps < self.next_look:
            return False
        due: bool = self._distributed.broadcast_json(self._distributed.is_chief and self._is_time())
        self._plan_look(steps, was_due=due)
        return due

    def last_save(self, deadline: float | None, *, in_flight: bool) -> LastSave:
        """What a stop leaves time for, `deadline` being when all ranks will be gone.

        `in_flight`: whether a save is under way. It is finished first, since it may be one that is to be kept, unless
        that would take the time of a newer one. No save is begun where it would be torn, and the newest checkpoint is
        as new as a periodic one, or under way; anything else is worth a try.
        """
        answer = self._last_save(deadline, in_flight).value if self._distributed.is_chief else None
        return LastSave(self._distributed.broadcast_json(answer))

    # --- around a save

    def save_begins(self, *, postponed: bool = False) -> None:
        self._began = self._clock()
        self._postponed = postponed

    def training_goes_on(self) -> None:
        self._since = self._clock()

    def save_committed(self) -> None:
        """May be called by the thread that commits."""
        self._committed = self._clock()

    def save_ends(self, steps: int, checkpoint: Committed | None) -> None:
        """`steps` batches are trained by now. `checkpoint`: what rank 0 has committed."""
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
        """`was_due`: a save is due and may be postponed; where it is not, its end plans the next look."""
        look = self._distributed.broadcast_json(self._look(steps, was_due) if self._distributed.is_chief else None)
        self.next_look = math.inf if look is None else look

    def _look(self, steps: int, was_due: bool) -> int | None:
        """None: never, `checkpoint_interval` is not `auto`."""
        if not (self._auto or self._has_lost_work or grace_is_too_short(self._grace_s, self._times)):
            return None
        if not self._batches_s:
            return steps + 1
        left_s = POSTPONED_S if was_due else self._left_s()
        left = math.ceil(left_s * self._batches / self._batches_s)
        return steps + max(1, min(left, self._batches))

    def _is_time(self) -> bool:
        if self._left_s() > 0:
            return False
        self._say()
        return True

    def _interval_s(self) -> float:
        """No save before the one before it is committed."""
        best_s = best_interval_s(self._stall_s(), mean_time_s(self._events, self._clock()))
        return max(best_s, self._times.mean_s if self._times else 0)

    def _stall_s(self) -> float:
        return self._times.stall_s if self._times else UNMEASURED_STALL_S

    def _left_s(self) -> float:
        """Until a save is due; the end of the last batch is on time, too, so that there is always an end."""
        return self._since + self._interval_s() - self._clock()

    def _last_save(self, deadline: float | None, in_flight: bool) -> LastSave:
        if deadline is None or self._times is None:
            return LastSave.AFTER_THE_ONE_IN_FLIGHT
        now, takes_s = self._clock(), self._times.mean_s
        left_s, lost_s = deadline - now, now - self._since
        if takes_s + (max(self._began + takes_s - now, 0) if in_flight else 0) <= left_s:
            return LastSave.AFTER_THE_ONE_IN_FLIGHT
        if takes_s <= left_s:
            return LastSave.INSTEAD
        if not in_flight and (self._newest is None or lost_s > self._interval_s()):
            return LastSave.AFTER_THE_ONE_IN_FLIGHT
        newest = "the one under way" if in_flight else f"the checkpoint at {self._newest} batches"
        print(
            f"hpc-det: leaves without a save: it takes {takes_s:.3g} s, and the job ends in {left_s:.3g} s; {newest} "
            f"is {lost_s:.3g} s old",
            flush=True,
        )
        return LastSave.NONE

    def _say(self) -> None:
        """When the interval is news: for the first time, or half as long again as was said, or less."""
        interval_s = self._interval_s()
        if self._said_s / 1.5 < interval_s < self._said_s * 1.5:
            return
        self._said_s = interval_s
        measured = "measured" if self._times else "a guess"
        print(
            f"hpc-det: checkpoint_interval auto{self._why()}: a save every {interval_s:.3g} s costs least, where one "
            f"stalls training for {self._stall_s():.2g} s ({measured}) and an interruption comes every "
            f"{mean_time_s(self._events, self._clock()):.3g} s",
            flush=True,
        )

    def _why(self) -> str:
        if self._grace_s is not None and grace_is_too_short(self._grace_s, self._times):
            return f", since the grace time of {self._grace_s:g} s is too short for a save"
        return ", since an attempt ended without a save" if self._has_lost_work else ""
