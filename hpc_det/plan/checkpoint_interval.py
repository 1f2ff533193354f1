"""How often to save, `checkpoint_interval: auto`: the rule of Young and Daly over what a trial has lived through."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hpc_det.requeue import Cause
from hpc_det.store.save_times import SaveTimes

UNMEASURED_STALL_S = 1.0
"""What a save is taken to cost before the first one is measured."""
UNKNOWN_MEAN_TIME_S = 4 * 3600.0
"""Between interruptions, before the first one: the geometric mean of the 7.9 h that jobs on 1,024 GPUs ran without a
failure at Meta (Kokolis et al., arXiv 2410.21680) and the 2 h that a preemptible queue may leave them.
"""
_INTERRUPTIONS = {Cause.FAILED, Cause.PREEMPTED, Cause.NODE_LOST, Cause.HUNG, Cause.UNHEALTHY}
"""A time limit comes as announced, and what a user asks for is no accident."""
_UNASKED = {Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.NODE_LOST}


def best_interval_s(stall_s: float, mean_time_s: float) -> float:
    """The time of training between two saves at which saves and lost work cost least together.

    Young's sqrt(2 C M) with the higher-order terms of J. T. Daly, Future Generation Computer Systems 22 (2006) 303,
    equation 37: without them saves that are long beside the mean time between interruptions would come too seldom.
    """
    if stall_s >= 2 * mean_time_s:
        return mean_time_s
    share = stall_s / (2 * mean_time_s)
    return math.sqrt(2 * stall_s * mean_time_s) * (1 + math.sqrt(share) / 3 + share / 9) - stall_s


def mean_time_s(events: Sequence[dict[str, Any]], now: float) -> float:
    """Between interruptions, by the events of a trial's journal; the attempt that runs now counts.

    A lost node is noted when the next attempt begins, so its attempt may seem too long; but the optimum is flat, and
    twice the time is an interval 1.4 times as long.
    """
    ends = {event["attempt"]: event for event in events if event["event"] == "ended"}
    interruptions = sum(Cause(end["cause"]) in _INTERRUPTIONS for end in ends.values())
    if not interruptions:
        return UNKNOWN_MEAN_TIME_S
    starts = [event for event in events if event["event"] == "started"]
    trained_s: float = sum(ends.get(start["attempt"], {"time": now})["time"] - start["time"] for start in starts)
    return max(trained_s / interruptions, 0.0)


def grace_is_too_short(grace_s: float | None, times: SaveTimes | None) -> bool:
    """Whether a preempted trial is known to be gone before it has saved. `grace_s` None: nobody knows it."""
    return grace_s is not None and (grace_s == 0 or (times is not None and grace_s < times.longest_s))


def has_lost_work(events: Sequence[dict[str, Any]]) -> bool:
    """Whether an attempt of the trial was ended from outside before it had saved anything new."""
    ends = [event for event in events if event["event"] == "ended"]
    reached = [0, *(end["steps"] for end in ends)]
    return any(Cause(end["cause"]) in _UNASKED and end["steps"] <= reached[i] for i, end in enumerate(ends))
