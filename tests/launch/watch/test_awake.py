from __future__ import annotations

import pytest

from hpc_det.launch.watch.awake import LONGEST_PAUSE_S, AwakeClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The machine's clock."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_it_counts_seconds_between_looks(now: list[float]) -> None:
    clock = AwakeClock()
    for _ in range(30):
        now[0] += 1
        clock.seconds()
    assert clock.seconds() == 30


def test_the_time_in_which_the_process_was_suspended_hardly_counts(now: list[float]) -> None:
    clock = AwakeClock()
    now[0] += 1
    assert clock.seconds() == 1
    now[0] += 3600
    assert clock.seconds() == 1 + LONGEST_PAUSE_S
