from __future__ import annotations

from typing import Any

import pytest

from hpc_det.view.pace import Epoch, Pace, epoch, remaining_of_search_s

EPOCHS = {"max_length": {"epochs": 20}}


def training(steps: int, time: float, attempt: int = 1, **more: float) -> dict[str, Any]:
    return {"kind": "training", "steps": steps, "time": time, "attempt": attempt, "metrics": {}, **more}


def pace(*reports: dict[str, Any]) -> Pace:
    found = Pace()
    for report in reports:
        found.take(report)
    return found


def test_the_remaining_time_follows_from_the_mean_speed_of_the_attempt() -> None:
    found = pace(training(100, 1000.0), training(200, 1010.0), training(300, 1040.0))
    assert found.remaining_s(300, 400) == pytest.approx(100 / (200 / 40))
    assert found.newest_batches_per_s == pytest.approx(100 / 30)


def test_an_earlier_attempt_does_not_count() -> None:
    found = pace(training(100, 1000.0), training(200, 1010.0), training(150, 5000.0, attempt=2))
    assert found.remaining_s(150, 400) is None
    assert found.newest_batches_per_s is None
    found.take(training(250, 5010.0, attempt=2))
    assert found.remaining_s(250, 400) == pytest.approx(15.0)


def test_without_a_length_or_after_one_report_no_time_is_known() -> None:
    assert pace().remaining_s(0, 400) is None
    assert pace(training(100, 1000.0)).remaining_s(100, 400) is None
    assert pace(training(100, 1000.0), training(200, 1010.0)).remaining_s(200, None) is None


def test_the_throughput_is_the_newest() -> None:
    found = pace(training(1, 1.0, samples_per_second=10.0), training(2, 2.0, samples_per_second=20.0))
    assert found.samples_per_s == 20.0
    found.take({"kind": "validation", "steps": 2, "time": 3.0, "attempt": 1, "metrics": {}})
    assert found.samples_per_s == 20.0


@pytest.mark.parametrize(
    ("batches", "total", "searcher", "found"),
    [
        (0, 460, EPOCHS, Epoch(1, 20)),
        (22, 460, EPOCHS, Epoch(1, 20)),
        (23, 460, EPOCHS, Epoch(2, 20)),
        (460, 460, EPOCHS, Epoch(20, 20)),
        (23, None, EPOCHS, None),
        (23, 460, {"max_length": {"batches": 460}}, None),
        (23, 460, {}, None),
    ],
)
def test_epochs_are_counted_from_one(batches: int, total: int | None, searcher: Any, found: Epoch | None) -> None:
    assert epoch(batches, total, searcher) == found


def test_a_search_needs_as_long_for_the_rest_as_for_its_progress() -> None:
    assert remaining_of_search_s(0.25, 100.0) == pytest.approx(300.0)
    assert remaining_of_search_s(0.0, 100.0) is None
