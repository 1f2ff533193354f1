"""A process that was stopped finds how long, and does not count it."""

from __future__ import annotations

import pytest

from hpc_det.node.awake import AwakeClock


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
    clock = AwakeClock(every_s=5)
    now[0] += 1
    assert clock.seconds() == 1
    now[0] += 3600
    assert clock.seconds() == 1 + 5
    now[0] += 1
    assert clock.seconds() == 1 + 5 + 1


def test_only_what_is_much_longer_than_between_looks_is_a_stop(now: list[float]) -> None:
    clock = AwakeClock()
    found = []
    for since in (1, 2.5, 100, 1):
        now[0] += since
        found.append(clock.stopped_s())
    assert found == [0, 0, 99, 0]
