from __future__ import annotations

import math
from pathlib import Path

from hpc_det.store.files import append_line
from hpc_det.store.metrics import validation_metrics, validations


def report(path: Path, kind: str, steps: int, **metrics: object) -> None:
    append_line(path, {"kind": kind, "steps": steps, "metrics": metrics})


def test_validations_are_by_batches_and_numbers_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    report(path, "training", 5, loss=0.1)
    report(path, "validation", 10, loss=0.5, matrix=[[1]], name="validation", flag=True)
    report(path, "validation", 20, loss="NaN", other=1)
    report(path, "validation", 30, loss="-Infinity")
    report(path, "validation", 40)
    found = validations(path, "loss")
    assert (found.pop(10), math.isnan(found.pop(20)), found) == (0.5, True, {30: -math.inf})
    assert validations(path, "matrix") == validations(path, "name") == validations(path, "flag") == {}
    assert validation_metrics(path)[20] == {"loss": "NaN", "other": 1}


def test_what_was_validated_again_counts_as_it_was_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    report(path, "validation", 10, loss=0.5)
    report(path, "validation", 10, loss=0.4)
    assert validations(path, "loss") == {10: 0.4}


def test_a_torn_line_is_left_out_and_a_missing_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "validation", "steps": 10, "met')
    assert validations(path, "loss") == validations(tmp_path / "none", "loss") == {}
