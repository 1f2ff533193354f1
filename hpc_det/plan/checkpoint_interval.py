"""The interval of `checkpoint_interval: auto`: the rule of Young and Daly, applied to the history of a trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hpc_det.requeue import Cause
from hpc_det.store.save_times import SaveTimes

UNMEASURED_STALL_S = 1.0
"""Seconds that a save is assumed to block training, before the first save is measured."""
UNKNOWN_MEAN_TIME_S = 4 * 3600.0
"""Seconds between interruptions, before the first one.

The geometric mean of 7.9 h, the mean time to failure of jobs on 1,024 GPUs at Meta (Kokolis et al., arXiv 2410.21680),
and 2 h, as a preemptible queue may grant.
"""
_INTERRUPTIONS = {Cause.FAILED, Cause.PREEMPTED, Cause.NODE_LOST, Cause.HUNG, Cause.UNHEALTHY}
"""Causes that count as interruptions. A time limit is announced, and stops by the user are planned."""
_UNASKED = {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST}
"""Causes from outside the trial, for which the user has not asked."""


def best_interval_s(stall_s: float, mean_time_s: float) -> float:
    """Return the seconds of training between two saves that minimise the cost of saves and lost work together.

    Young's sqrt(2 C M) with the higher-order terms of J. T. Daly, Future Generation Computer Systems 22 (2006) 303,
    equation 37. Without these terms, saves that are long compared with the mean time between interruptions would be too
    rare.
    """
    if stall_s >= 2 * mean_time_s:
        return mean_time_s
    share = stall_s / (2 * mean_time_s)
    return math.sqrt(2 * stall_s * mean_time_s) * (1 + math.sqrt(share) / 3 + share / 9) - stall_s


def mean_time_s(events: Sequence[dict[str, Any]], now: float) -> float:
    """Return the mean seconds between interruptions, from the events of a trial's journal, the running attempt
    included.

    A lost node is recorded when the next attempt starts, so its attempt may appear too long. The optimum is flat: twice
    the time gives an interval that is 1.4 times as long.
    """
    ends = {event["attempt"]: event for event in events if event["event"] == "ended"}
    interruptions = sum(Cause(end["cause"]) in _INTERRUPTIONS for end in ends.values())
    if not interruptions:
        return UNKNOWN_MEAN_TIME_S
    starts = [event for event in events if event["event"] == "started"]
    trained_s: float = sum(ends.get(start["attempt"], {"time": now})["time"] - start["time"] for start in starts)
    return max(trained_s / interruptions, 0.0)


def grace_is_too_short(grace_s: float | None, times: SaveTimes | None) -> bool:
    """Return whether a preempted trial is known to be killed before it has saved. `grace_s` is None if unknown."""
    return grace_s is not None and (grace_s == 0 or (times is not None and grace_s < times.longest_s))


def has_lost_work(events: Sequence[dict[str, Any]]) -> bool:
    """Return whether an attempt of the trial was stopped from outside before it saved anything new."""
    ends = [event for event in events if event["event"] == "ended"]
    reached = [0, *(end["steps"] for end in ends)]
    return any(Cause(end["cause"]) in _UNASKED and end["steps"] <= reached[i] for i, end in enumerate(ends))
