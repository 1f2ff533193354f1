from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpc_det.store.files import append_line
from hpc_det.store.metrics import read_reports, reports_of, samples_per_second, validation_metrics, validations


def report(kind: str, steps: int, attempt: int = 1) -> dict[str, Any]:
    return {"kind": kind, "steps": steps, "metrics": {}, "attempt": attempt}


def begins(trained: int, validated: int, attempt: int = 2) -> dict[str, Any]:
    return {"kind": "begins", "trained": trained, "validated": validated, "attempt": attempt}


def test_reports_beyond_the_checkpoint_that_training_goes_on_from_are_void() -> None:
    kept = [report("training", 10), report("validation", 10), report("training", 20)]
    lost = [report("validation", 20), report("training", 30)]
    again = [report("validation", 20, attempt=2), report("training", 30, attempt=2)]
    assert reports_of([*kept, *lost, begins(20, 10), *again]) == [*kept, *again]


def test_a_later_attempt_that_begins_earlier_makes_more_void() -> None:
    lines = [report("training", 10), report("training", 20), begins(20, 0), report("training", 30, 2), begins(10, 0, 3)]
    assert reports_of(lines) == [report("training", 10)]


def test_an_attempt_that_lost_nothing_makes_nothing_void() -> None:
    lines = [begins(0, -1, 1), report("validation", 0), report("training", 10), begins(10, 0)]
    assert reports_of(lines) == [report("validation", 0), report("training", 10)]


def test_the_throughput_is_that_of_each_training_report_that_stands(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps, rate in ((10, 5.0), (20, 7.0), (30, 9.0)):
        append_line(path, {"kind": "training", "steps": steps, "metrics": {}, "samples_per_second": rate})
    append_line(path, {"kind": "validation", "steps": 20, "metrics": {}, "seconds": 1.0})
    append_line(path, {"kind": "begins", "trained": 20, "validated": 20})
    assert samples_per_second(path) == [5.0, 7.0]


def test_a_trial_that_has_not_begun_has_no_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_reports(path) == []
    append_line(path, begins(0, -1))
    assert read_reports(path) == []


def written(path: Path, kind: str, steps: int, **metrics: object) -> None:
    append_line(path, {"kind": kind, "steps": steps, "metrics": metrics})


def test_validations_are_by_batches_and_numbers_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, "training", 5, loss=0.1)
    written(path, "validation", 10, loss=0.5, matrix=[[1]], name="validation", flag=True)
    written(path, "validation", 20, loss="NaN", other=1)
    written(path, "validation", 30, loss="-Infinity")
    written(path, "validation", 40)
    found = validations(path, "loss")
    assert (found.pop(10), math.isnan(found.pop(20)), found) == (0.5, True, {30: -math.inf})
    assert validations(path, "matrix") == validations(path, "name") == validations(path, "flag") == {}
    assert validation_metrics(path)[20] == {"loss": "NaN", "other": 1}


def test_what_was_validated_again_counts_as_it_was_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, "validation", 10, loss=0.5)
    written(path, "validation", 10, loss=0.4)
    assert validations(path, "loss") == {10: 0.4}


def test_what_was_validated_beyond_the_checkpoint_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, "validation", 10, loss=0.5)
    written(path, "validation", 20, loss=0.4)
    append_line(path, begins(10, 10))
    assert validations(path, "loss") == {10: 0.5}


def test_a_torn_line_is_left_out_and_a_missing_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "validation", "steps": 10, "met')
    assert validations(path, "loss") == validations(tmp_path / "none", "loss") == {}
