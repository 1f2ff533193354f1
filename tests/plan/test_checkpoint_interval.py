from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.plan.checkpoint_interval import (
    UNKNOWN_MEAN_TIME_S,
    best_interval_s,
    grace_is_too_short,
    has_lost_work,
    mean_time_s,
)
from hpc_det.store.save_times import after_save
from tests.checkpoint.saved import save


def wall_time(interval_s: float, stall_s: float, mean_s: float) -> float:
    """Return the wall time per second of training, with random interruptions (Daly's equation 20 without restarts)."""
    return mean_s / interval_s * math.expm1((interval_s + stall_s) / mean_s)


@given(stall_s=st.floats(1e-3, 1e3), mean_s=st.floats(10, 1e6), factor=st.floats(0.2, 5))
def test_no_other_interval_costs_noticeably_less(stall_s: float, mean_s: float, factor: float) -> None:
    if stall_s > mean_s / 2:  # the expansion does not apply there, and training makes little progress anyway
        return
    best = best_interval_s(stall_s, mean_s)
    other = min(best * factor, 50 * mean_s)
    assert wall_time(best, stall_s, mean_s) <= 1.01 * wall_time(other, stall_s, mean_s)


@given(stall_s=st.floats(1e-6, 1e5), mean_s=st.floats(1e-6, 1e5))
def test_an_interval_is_never_negative(stall_s: float, mean_s: float) -> None:
    assert best_interval_s(stall_s, mean_s) >= 0


def test_short_saves_follow_youngs_rule() -> None:
    assert best_interval_s(0.1, 7.9 * 3600) == pytest.approx(75, rel=0.01)


def journal(*attempts: tuple[float, float, str, int]) -> list[dict[str, Any]]:
    """Return the journal of attempts, each given as (start, end, cause, batches)."""
    return [
        event
        for number, (start, end, cause, steps) in enumerate(attempts, 1)
        for event in (
            {"event": "started", "attempt": number, "time": start},
            {"event": "ended", "attempt": number, "time": end, "cause": cause, "steps": steps},
        )
    ]


def test_the_time_between_interruptions_is_a_guess_until_the_first() -> None:
    assert mean_time_s([], 100) == UNKNOWN_MEAN_TIME_S
    assert mean_time_s(journal((0, 9, "time limit", 1), (9, 10, "paused", 1)), 100) == UNKNOWN_MEAN_TIME_S


def test_the_time_in_the_queue_is_none_between_interruptions_and_the_attempt_that_runs_counts() -> None:
    events = journal((0, 100, "preempted", 5), (500, 800, "failed", 9), (900, 1000, "time limit", 10))
    events.append({"event": "started", "attempt": 4, "time": 2000})
    assert mean_time_s(events, now=2100) == (100 + 300 + 100 + 100) / 2


def test_an_attempt_that_was_ended_from_outside_with_nothing_new_saved_has_lost_work() -> None:
    assert not has_lost_work([])
    assert not has_lost_work(journal((0, 1, "preempted", 5), (2, 3, "failed", 5), (4, 5, "cancelled", 5)))
    assert has_lost_work(journal((0, 1, "preempted", 5), (2, 3, "preempted", 5)))
    assert has_lost_work(journal((0, 1, "node lost", 0)))


@pytest.mark.parametrize(
    ("grace_s", "took_s", "is_short"),
    [(None, 9, False), (0, None, True), (9, None, False), (9, 8, False), (9, 10, True)],
)
def test_a_grace_time_is_compared_with_the_longest_save(
    grace_s: float | None, took_s: float | None, is_short: bool
) -> None:
    times = after_save(None, save(took_s)) if took_s else None
    assert grace_is_too_short(grace_s, times) is is_short
