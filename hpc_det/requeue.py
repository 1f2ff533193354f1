"""What happens next: how attempts ended, and the budgets, decide. Pure functions over the journal's facts.

Only failures count against `max_restarts` (upstream's rule: preemption and lost nodes are not charged). Nor are hangs,
unhealthy nodes and full disks. A run that comes back again and again without a newer checkpoint, whatever but a full
disk ended its attempts, is stopped: it would go on for ever. Attempts that had no chance to save one have a budget of
their own, TOO_SHORT times as large.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Cause(str, enum.Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NODE_LOST = "node lost"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    """By its user, until `experiment activate`."""
    WAITING = "waiting"
    """The searcher let go of the trial, which may go on later."""
    HUNG = "hung"
    """A rank made no step for too long."""
    DISK_FULL = "disk full"
    """A file could not be written for want of space, or of quota."""
    SCHEDULER_AWAY = "scheduler away"
    """The scheduler gave no answer when ranks were to be started."""
    RESUME_CHECK = "resume check"
    """`experiment verify-resume` stops its trainings at chosen batches."""
    UNHEALTHY = "unhealthy node"
    """A node failed its checks before the rendezvous: it is excluded, and nobody is charged."""


class Action(str, enum.Enum):
    DONE = "done"
    WAIT = "wait"
    """For the searcher, which may want more of this trial."""
    RESTART = "restart"
    """Start again at once on the nodes that the job holds."""
    REQUEUE = "requeue"
    PAUSE = "pause"
    """Leave the nodes and the queue, until the user wants it again."""
    GIVE_UP = "give up"


NO_PROGRESS_LIMIT = 5
"""The default of `max_attempts_without_progress`: attempts in a row without a newer checkpoint that end the trial."""
TOO_SHORT = 10
"""The limit of attempts that were too short to save a checkpoint, in multiples of the one above."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    cause: Cause
    steps: int
    """Batches in the newest committed checkpoint when the attempt ended; 0 with none."""
    user_error: bool = False
    """The same error would come again: bad configuration or a trial class that cannot work."""
    too_short: bool = False
    """It ended before a checkpoint could be saved: before the first batch, soon after it, or within the save."""
    log_policy: str | None = None
    """The name of one that cancels retries, and that the logs matched."""


@dataclass(frozen=True)
class Decision:
    action: Action
    why: str


def decide(history: Sequence[AttemptEnd], max_restarts: int, limit: int = NO_PROGRESS_LIMIT) -> Decision:
    """What follows the last of `history` (oldest first, never empty).

    `limit`: of attempts in a row without a newer checkpoint.
    """
    last = history[-1]
    if last.cause in (Cause.FINISHED, Cause.CANCELLED):
        return Decision(Action.DONE, last.cause.value)
    if last.cause in (Cause.WAITING, Cause.PAUSED):
        return Decision(Action.WAIT if last.cause is Cause.WAITING else Action.PAUSE, last.cause.value)
    if last.cause is Cause.DISK_FULL:
        return Decision(
            Action.RESTART,
            "disk full, not charged; the job waits for space until its time limit, and so do the jobs after it, until "
            "there is space or the experiment is paused or cancelled",
        )
    if last.cause is Cause.RESUME_CHECK:
        return Decision(Action.RESTART, "resume check; not charged")
    if last.cause is Cause.FAILED:
        return _after_failure(history, max_restarts)
    stalled = _attempts_without_progress(history)
    too_short = sum(end.too_short for end in stalled)
    stuck = len(stalled) - too_short
    if stuck >= limit or too_short >= TOO_SHORT * limit:
        return Decision(
            Action.GIVE_UP,
            f"{len(stalled)} attempts in a row ended ({last.cause.value}) without a newer checkpoint than {last.steps} "
            f"batches, {too_short} of them too early to save one; set min_checkpoint_period, or ask for a longer grace "
            f"or time limit (max_attempts_without_progress is {limit})",
        )
    why = ", ".join([last.cause.value, *_left(stuck, limit, "without progress"), *_left_short(too_short, limit)])
    return Decision(Action.RESTART if last.cause is Cause.HUNG else Action.REQUEUE, why)


def _left_short(too_short: int, limit: int) -> list[str]:
    return _left(too_short, TOO_SHORT * limit, "that ended too early to save a checkpoint")


def _left(count: int, limit: int, which: str) -> list[str]:
    """What becomes of it, if there is any."""
    more = limit - count
    return [f"{count} of {limit} attempts {which}; gives up after {more} more"] if count else []


def _after_failure(history: Sequence[AttemptEnd], max_restarts: int) -> Decision:
    if history[-1].user_error:
        return Decision(Action.GIVE_UP, "the same error would come again")
    if policy := history[-1].log_policy:
        return Decision(Action.GIVE_UP, f"the log policy {policy!r} cancels retries")
    failures = sum(end.cause is Cause.FAILED for end in history)
    if failures > max_restarts:
        return Decision(Action.GIVE_UP, f"{failures} failures, max_restarts is {max_restarts}")
    return Decision(Action.RESTART, f"failure {failures} of {max_restarts} that max_restarts allows")


def _attempts_without_progress(history: Sequence[AttemptEnd]) -> Sequence[AttemptEnd]:
    """The attempts at the end of `history` that reached no newer checkpoint than the one before them. Those that a full
    disk ended count for nothing.
    """
    history = [end for end in history if end.cause is not Cause.DISK_FULL]
    reached = [0, *(end.steps for end in history)]
    count = 0
    while count < len(history) and reached[-1 - count] <= reached[-2 - count]:
        count += 1
    return history[len(history) - count :]
