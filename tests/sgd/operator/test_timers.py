from __future__ import annotations

import math
import time

import pytest
import torch

from hpc_det.sgd.operator.timers import TimerCollection, TimerStat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What perf_counter says from here on."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_last_ten_times_make_the_mean(clock: list[float]) -> None:
    timers = TimerCollection()
    timers.enable()
    for seconds in [100.0, *range(1, 11)]:
        with timers.record("fwd"):
            clock[0] += seconds
    assert timers.stats() == {"mean_fwd_s": 5.5}


def test_timers_are_off_at_first_and_again_when_disabled() -> None:
    timers = TimerCollection()
    with timers.record("fwd"):
        pass
    timers.enable()
    timers.disable()
    with timers.record("fwd"):
        pass
    assert timers.stats() == {}


def test_a_reset_forgets_and_parts_may_lie_in_parts(clock: list[float]) -> None:
    timers = TimerCollection()
    timers.enable()
    with timers.record("old"):
        pass
    timers.reset()
    with timers.record("epoch"):
        clock[0] += 1
        with timers.record("fwd"):
            clock[0] += 2
    assert timers.stats() == {"mean_fwd_s": 2, "mean_epoch_s": 3}


def test_a_timer_without_times_has_no_mean() -> None:
    assert math.isnan(TimerStat().mean)


def test_on_a_gpu_each_part_waits_for_the_device_and_only_when_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    timers = TimerCollection(torch.device("cuda", 1))
    with timers.record("fwd"):
        pass
    assert waits == []
    timers.enable()
    with timers.record("fwd"):
        assert waits == [torch.device("cuda", 1)]
    assert len(waits) == 2
