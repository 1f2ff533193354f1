from __future__ import annotations

from typing import Any

from hpc_det.report.trial import curves
from hpc_det.view.metric_history import MetricHistory


def report(kind: str, steps: int, metrics: dict[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "attempt": 1, "time": 1.0, "steps": steps, "metrics": metrics}


def test_curves_are_of_numbers_and_what_is_none_is_a_gap() -> None:
    history = MetricHistory(
        [
            report("validation", 10, {"accuracy": 0.5, "matrix": [[1]], "odd": None}),
            report("validation", 20, {"accuracy": "NaN", "matrix": [[1]], "odd": None}),
            report("training", 20, {"loss": 1}),
        ]
    )
    assert curves(history.validation) == {"accuracy": [(10, 0.5), (20, None)]}
    assert curves(history.training) == {"loss": [(20, 1.0)]}
