"""What happens next: how attempts ended, and the budgets, decide. Pure functions over the journal's facts.

Only failures count against `max_restarts` (upstream's rule: preemption and lost nodes are not charged). Nor are hangs,
unhealthy nodes and full disks. A run that comes back again and again without a newer checkpoint, whatever but a full
disk ended its attempts, is stopped: it would go on for ever.
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
"""Attempts in a row without a newer checkpoint after which nothing is queued again."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    cause: Cause
    steps: int
    """Batches in the newest committed checkpoint when the attempt ended; 0 with none."""
    user_error: bool = False
    """The same error would come again: bad configuration or a trial class that cannot work."""
    log_policy: str | None = None
    """The name of one that cancels retries, and that the logs matched."""


@dataclass(frozen=True)
class Decision:
    action: Action
    why: str


def decide(history: Sequence[AttemptEnd], max_restarts: int) -> Decision:
    """What follows the last of `history` (oldest first, never empty)."""
    last = history[-1]
    if last.cause in (Cause.FINISHED, Cause.CANCELLED):
        return Decision(Action.DONE, last.cause.value)
    if last.cause in (Cause.WAITING, Cause.PAUSED):
        return Decision(Action.WAIT if last.cause is Cause.WAITING else Action.PAUSE, last.cause.value)
    if last.cause is Cause.DISK_FULL:
        return Decision(Action.RESTART, "disk full; waits for space, and is not charged")
    if last.cause is Cause.FAILED:
        return _after_failure(history, max_restarts)
    stuck = _attempts_without_progress(history)
    if stuck >= NO_PROGRESS_LIMIT:
        return Decision(
            Action.GIVE_UP,
            f"{stuck} attempts in a row ended ({last.cause.value}) without a newer checkpoint than {last.steps} "
            f"batches; set min_checkpoint_period, or ask for a longer grace or time limit",
        )
    return Decision(Action.RESTART if last.cause is Cause.HUNG else Action.REQUEUE, last.cause.value)


def _after_failure(history: Sequence[AttemptEnd], max_restarts: int) -> Decision:
    if history[-1].user_error:
        return Decision(Action.GIVE_UP, "the same error would come again")
    if policy := history[-1].log_policy:
        return Decision(Action.GIVE_UP, f"the log policy {policy!r} cancels retries")
    failures = sum(end.cause is Cause.FAILED for end in history)
    if failures > max_restarts:
        return Decision(Action.GIVE_UP, f"{failures} failures, max_restarts is {max_restarts}")
    return Decision(Action.RESTART, f"failure {failures} of {max_restarts} that max_restarts allows")


def _attempts_without_progress(history: Sequence[AttemptEnd]) -> int:
    """How many attempts at the end of `history` reached no newer checkpoint than the one before them. Those that a full
    disk ended count for nothing.
    """
    history = [end for end in history if end.cause is not Cause.DISK_FULL]
    reached = [0, *(end.steps for end in history)]
    count = 0
    while count < len(history) and reached[-1 - count] <= reached[-2 - count]:
        count += 1
    return count
