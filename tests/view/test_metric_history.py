from __future__ import annotations

import math
import tracemalloc

from hpc_det.view.metric_history import Curve, MetricHistory
from tests.checkpoint.saved import save
from tests.report.test_spans import begins, trained, validated


def curve(*values: float) -> Curve:
    made = Curve()
    for batches, value in enumerate(values):
        made.append(batches, value)
    return made


def test_speed_is_of_training_alone() -> None:
    lines = [begins(1, 100), trained(1, 110, 20), validated(1, 115, 20, seconds=5), trained(1, 127, 40)]
    history = MetricHistory(lines, [save(2, 2, batches=20, began=115)])
    assert history.batches_per_s.points(10) == [(20, 2.0), (40, 2.0)]


def test_each_attempt_is_measured_from_its_own_begin_and_what_was_lost_is_left_out() -> None:
    lines = [begins(1, 0), trained(1, 10, 20), trained(1, 20, 40), begins(2, 100, trained=20), trained(2, 110, 40)]
    assert MetricHistory(lines).batches_per_s.points(10) == [(20, 2.0), (40, 2.0)]


def test_reports_that_a_later_attempt_makes_void_leave_the_curves() -> None:
    def line(kind: str, attempt: int, steps: int, value: float) -> dict[str, object]:
        return {"kind": kind, "attempt": attempt, "time": 1.0, "steps": steps, "metrics": {"loss": value}}

    first = [line("training", 1, 10, 1.0), line("training", 1, 20, 2.0), line("validation", 1, 20, 3.0)]
    history = MetricHistory([begins(1, 0), *first, begins(2, 5, trained=10), line("training", 2, 20, 4.0)])
    assert history.training["loss"].points(10) == [(10, 1.0), (20, 4.0)]
    assert history.validation["loss"].points(10) == []


def test_a_curve_with_too_many_points_keeps_its_ends_peaks_and_gaps() -> None:
    values = [float(number % 7) for number in range(10_000)]
    values[4321], values[8765], values[5000] = 99.0, -99.0, math.nan
    points = curve(*values).points(300)
    assert len(points) <= 300
    assert (points[0], points[-1]) == ((0, 0.0), (9999, 9999 % 7))
    assert {(4321, 99.0), (8765, -99.0), (5000, None)} <= set(points)
    assert [batches for batches, _ in points] == sorted(batches for batches, _ in points)


def test_a_curve_with_few_points_keeps_all() -> None:
    assert curve(1.0, math.nan, 3.0).points(3) == [(0, 1.0), (1, None), (2, 3.0)]


def test_a_long_file_takes_little_memory() -> None:
    line = {"kind": "training", "attempt": 1, "time": 1.0, "metrics": {"loss": 0.5}}
    tracemalloc.start()
    try:
        history = MetricHistory({**line, "steps": steps} for steps in range(50_000))
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(history.training["loss"]) == 50_000
    assert size < 50_000 * 50
