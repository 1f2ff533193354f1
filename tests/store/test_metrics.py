from __future__ import annotations

import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.node.json_files import append_line, append_lines, newest_first, parse_line
from hpc_det.store.metrics import (
    last_reports,
    number_in,
    read_reports,
    reports_of,
    samples_per_second,
    validation_metrics,
    validations,
)


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
    assert validation_metrics(path, {20})[20] == {"loss": "NaN", "other": 1}


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


# --- long files


def a_line(draw: st.DrawFn) -> str:
    kind = draw(st.sampled_from(["training", "validation", "validation", "begins"]))
    if kind == "begins":
        at = draw(st.integers(0, 9))
        return json.dumps({"kind": kind, "trained": at, "validated": at, "attempt": 1, "time": 1.0})
    values = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.sampled_from(ODD_VALUES))
    metrics = draw(st.dictionaries(st.sampled_from(["loss", "my loss", "validation", "a\\b"]), values, max_size=3))
    record = {"kind": kind, "steps": draw(st.integers(0, 9)), "total": 9, "metrics": metrics, "attempt": 1}
    separators = draw(st.sampled_from([(", ", ": "), (",", ":")]))
    return json.dumps(record, separators=separators)


ODD_LINES = ['{"kind": "validation", "ste', "[]", "\N{BELL}", ""]
ODD_VALUES = ["NaN", "Infinity", None, True, [1], {"loss": 1}, ', "loss": 5', "{", "begins"]


@st.composite
def files(draw: st.DrawFn) -> str:
    odd = st.sampled_from(ODD_LINES)
    lines = [a_line(draw) if draw(st.integers(0, 9)) else draw(odd) for _ in range(draw(st.integers(0, 30)))]
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))


@pytest.mark.integration
@given(files(), st.sampled_from([1, 50, 2**20]))
def test_partial_reads_agree_with_reading_all_lines(content: str, block: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("hpc_det.node.json_files.BLOCK_BYTES", block)
        path = Path(folder, "metrics.jsonl")
        path.write_text(content)
        reports = read_reports(path)
        assert last_reports(path) == {report["kind"]: report for report in reports}
        validated = {report["steps"]: report["metrics"] for report in reports if report["kind"] == "validation"}
        assert validation_metrics(path, {3, 4, 5}) == {at: validated[at] for at in {3, 4, 5} & validated.keys()}
        for metric in ("loss", "a\\b"):
            numbers = {at: number_in(metrics.get(metric)) for at, metrics in validated.items()}
            expected = {at: value for at, value in numbers.items() if value is not None}
            assert repr(sorted(validations(path, metric).items())) == repr(sorted(expected.items()))  # NaN != NaN


@pytest.mark.integration
@given(files(), st.sampled_from([1, 7, 2**20]))
def test_lines_from_the_end_are_the_lines(content: str, block: int) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("hpc_det.node.json_files.BLOCK_BYTES", block)
        path = Path(folder, "lines")
        path.write_text(content)
        assert [*newest_first(path)][::-1] == content.encode().split(b"\n")


@pytest.mark.integration
def test_few_lines_of_a_long_file_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"kind": "begins", "trained": 0, "validated": -1})
    kinds = {steps: "training" if steps % 10 else "validation" for steps in range(1, 100_001)}
    append_lines(path, [{"kind": kinds[at], "steps": at, "total": 9, "metrics": {"loss": 0.5}} for at in kinds])
    parsed: list[bytes] = []

    def parse(line: bytes, file: object) -> dict[str, Any] | None:
        parsed.append(line)
        return parse_line(line, file)

    monkeypatch.setattr("hpc_det.store.metrics.parse_line", parse)
    assert last_reports(path)["validation"]["steps"] == 100_000
    assert len(validations(path, "loss")) == 10_000
    assert len(parsed) < 2_000  # the block with the first line of the attempt, and the last lines
