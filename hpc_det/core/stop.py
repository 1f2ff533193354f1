"""The stop of a training, which `should_stop` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_det.store.attempt import Reason, StopRequest

StopReason = Literal["preempted", "time limit", "paused", "cancelled", "search", "resume check"]
"""Why a loop must end.

"preempted": by the scheduler, or by a signal outside a job; "search": the searcher requests no more training of this
trial for now, or a short run, as with `--test`, has its length; "resume check": by `experiment verify-resume`.
"""
_REASONS: dict[Reason, StopReason] = {
    "signal": "preempted",
    "time limit": "time limit",
    "pause": "paused",
    "cancel": "cancelled",
    "kill": "cancelled",
    "resume check": "resume check",
}


@dataclass(frozen=True)
class Stop:
    """The answer of `should_stop`: true if the loop must end. It is the same on every rank."""

    reason: StopReason | None = None
    """None: there is no stop."""
    deadline: float | None = None
    """When the processes will be killed, in seconds since the epoch; None: unknown, or there is no stop."""

    def __bool__(self) -> bool:
        return self.reason is not None


NO_STOP = Stop()
REPORT_WAITS = Stop()
"""No stop yet: a loop that writes its own checkpoints has validated at a length of the search.

The validation is reported to the search when the loop has committed a checkpoint, or when it asks next.
"""


def stop_of(request: StopRequest | None, deadline: float | None) -> Stop:
    """Return the stop for a stop request; None: a signal to this process alone, or the request is not visible yet."""
    if request is None:
        return Stop("preempted", deadline)
    return Stop(_REASONS[request.reason], request.deadline if deadline is None else deadline)
