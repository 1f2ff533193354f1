"""The decision whether a trial runs again after an attempt ended. Pure functions over the ends in its journal.

Only failures count against `max_restarts`. As in Determined, preemptions and lost nodes do not count; neither do hangs,
unhealthy nodes and full disks. A second budget bounds the attempts in a row that end without a newer checkpoint, since
such a trial would otherwise be requeued for ever; full disks do not count there either. Attempts that ended too early
to save a checkpoint have their own budget, TOO_SHORT times as large.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_det.errors import count


class Cause(str, enum.Enum):
    """The cause of an attempt's end."""

    FINISHED = "finished"
    FAILED = "failed"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    NODE_LOST = "node lost"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    """Paused by the user; `experiment activate` resumes it."""
    WAITING = "waiting"
    """The searcher has no work for the trial at present, and may resume it later."""
    HUNG = "hung"
    """A rank made no step within the hang timeout."""
    DISK_FULL = "disk full"
    """Writing a file failed because the disk or the quota is full."""
    SCHEDULER_AWAY = "scheduler away"
    """The scheduler did not answer when ranks were to be started."""
    RESUME_CHECK = "resume check"
    """Stopped at a batch that `experiment verify-resume` chose."""
    UNHEALTHY = "unhealthy node"
    """A node failed its health checks before the rendezvous; it is excluded, and max_restarts is not charged."""


class Action(str, enum.Enum):
    """The step that the job takes after an attempt."""

    DONE = "done"
    WAIT = "wait"
    """Wait for the searcher, which may train this trial further."""
    RESTART = "restart"
    """Start the next attempt at once on the nodes that the job holds."""
    REQUEUE = "requeue"
    """Release the nodes, and start the next attempt in a requeued or successor job."""
    PAUSE = "pause"
    """Release the nodes without requeueing, until the user activates the experiment."""
    GIVE_UP = "give up"
    """End the trial as failed."""


NO_PROGRESS_LIMIT = 5
"""The default of `max_attempts_without_progress`: attempts in a row without a newer checkpoint that end the trial."""
TOO_SHORT = 10
"""The factor by which the limit is larger for attempts that were too short to save a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class AttemptEnd:
    """The end of one attempt, as recorded in the trial's journal."""

    cause: Cause
    steps: int
    """Batches in the newest committed checkpoint when the attempt ended; 0 with none."""
    user_error: bool = False
    """True if a retry would fail with the same error: invalid configuration, or a trial class that cannot run."""
    too_short: bool = False
    """True if it ended before a checkpoint could be saved: before the first batch, soon after it, or during the
    save.
    """
    failure: str = ""
    """The first failure as a sentence; "" without one."""
    log_policy: str | None = None
    """Name of the log policy with `action: cancel_retries` that a line of the logs matched; None if none did."""


@dataclass(frozen=True)
class Decision:
    """The action after an attempt, and its reason as text for the log."""

    action: Action
    why: str


def decide(history: Sequence[AttemptEnd], max_restarts: int, limit: int = NO_PROGRESS_LIMIT) -> Decision:
    """Return the action that follows the last attempt of `history` (oldest first, not empty).

    `limit`: attempts in a row without a newer checkpoint after which the trial is given up.
    """
    last = history[-1]
    if last.cause in (Cause.FINISHED, Cause.CANCELLED):
        return Decision(Action.DONE, last.cause.value)
    if last.cause in (Cause.WAITING, Cause.PAUSED):
        return Decision(Action.WAIT if last.cause is Cause.WAITING else Action.PAUSE, last.cause.value)
    if last.cause is Cause.DISK_FULL:
        return Decision(
            Action.RESTART,
            "disk full, not charged; the job waits for space until its time limit, and so do its successors, unless "
            "the experiment is paused or cancelled",
        )
    if last.cause is Cause.RESUME_CHECK:
        return Decision(Action.RESTART, "resume check; not charged")
    if last.cause is Cause.FAILED:
        return _after_failure(history, max_restarts)
    stalled = _attempts_without_progress(history)
    too_short = sum(end.too_short for end in stalled)
    stuck = len(stalled) - too_short
    # Without this limit a trial whose jobs always end before a save would be requeued for ever.
    if stuck >= limit or too_short >= TOO_SHORT * limit:
        return Decision(
            Action.GIVE_UP,
            f"{count(len(stalled), 'attempt')} in a row ended ({last.cause.value}) without a newer checkpoint than "
            f"{count(last.steps, 'batch')} ({too_short} ended too early to save one); set min_checkpoint_period, or "
            f"request a longer grace or time limit (max_attempts_without_progress is {limit})",
        )
    why = ", ".join([last.cause.value, *_left(stuck, limit, "without progress"), *_left_short(too_short, limit)])
    # After a hang the job still holds its nodes, so the ranks are started again at once.
    return Decision(Action.RESTART if last.cause is Cause.HUNG else Action.REQUEUE, why)


def _left_short(too_short: int, limit: int) -> list[str]:
    return _left(too_short, TOO_SHORT * limit, "that ended too early to save a checkpoint")


def _left(used: int, limit: int, which: str) -> list[str]:
    """Return one phrase on how much of a budget is used and left; no phrase while none of it is used."""
    more = limit - used
    return [f"{used} of {count(limit, 'attempt')} {which}; gives up after {more} more"] if used else []


def _after_failure(history: Sequence[AttemptEnd], max_restarts: int) -> Decision:
    if history[-1].user_error:
        return Decision(Action.GIVE_UP, "not retried: the error is permanent")
    if policy := history[-1].log_policy:
        return Decision(Action.GIVE_UP, f"the log policy {policy!r} cancels retries")
    failures = sum(end.cause is Cause.FAILED for end in history)
    if failures > max_restarts:
        return Decision(Action.GIVE_UP, f"failure {failures}; max_restarts is {max_restarts}")
    return Decision(Action.RESTART, f"failure {failures} of {max_restarts} that max_restarts allows")


_DIFFERS = re.compile(r"0x[0-9a-f]+|\d+|^rank \d+(?: on \S+)?: ")
"""The parts in which two reports of one error differ: the rank, and numbers such as addresses and sizes."""


def repeats_failure(history: Sequence[AttemptEnd]) -> bool:
    """Return whether the last two attempts failed with the same error, the last one without a newer checkpoint."""
    if len(history) < 2 or any(end.cause is not Cause.FAILED or not end.failure for end in history[-2:]):
        return False
    before, last = history[-2:]
    errors = {_DIFFERS.sub("#", end.failure) for end in (before, last)}
    return len(errors) == 1 and last.steps <= before.steps


def _attempts_without_progress(history: Sequence[AttemptEnd]) -> Sequence[AttemptEnd]:
    """Return the attempts at the end of `history` that reached no newer checkpoint than their predecessor.

    Attempts that a full disk ended are left out.
    """
    history = [end for end in history if end.cause is not Cause.DISK_FULL]
    reached = [0, *(end.steps for end in history)]  # a first attempt without a checkpoint made no progress either
    count = 0
    while count < len(history) and reached[-1 - count] <= reached[-2 - count]:
        count += 1
    return history[len(history) - count :]
