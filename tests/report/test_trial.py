from __future__ import annotations

from hpc_det.report.trial import curves, speeds
from tests.checkpoint.saved import save
from tests.report.test_spans import begins, trained, validated


def test_speed_is_of_training_alone() -> None:
    lines = [begins(1, 100), trained(1, 110, 20), validated(1, 115, 20, seconds=5), trained(1, 127, 40)]
    assert speeds(lines, [save(2, 2, batches=20, began=115)]) == [(20, 2.0), (40, 2.0)]


def test_each_attempt_is_measured_from_its_own_begin_and_what_was_lost_is_left_out() -> None:
    lines = [begins(1, 0), trained(1, 10, 20), trained(1, 20, 40), begins(2, 100, trained=20), trained(2, 110, 40)]
    assert speeds(lines, []) == [(20, 2.0), (40, 2.0)]


def test_curves_are_of_numbers_and_what_is_none_is_a_gap() -> None:
    reports = [
        {"kind": "validation", "steps": 10, "metrics": {"accuracy": 0.5, "matrix": [[1]], "odd": None}},
        {"kind": "validation", "steps": 20, "metrics": {"accuracy": "NaN", "matrix": [[1]], "odd": None}},
        {"kind": "training", "steps": 20, "metrics": {"loss": 1}},
    ]
    assert curves(reports, "validation") == {"accuracy": [(10, 0.5), (20, None)]}
    assert curves(reports, "training") == {"loss": [(20, 1.0)]}
