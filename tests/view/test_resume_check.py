"""The first difference between two trainings, from the traces of their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder
from hpc_det.store.trace_names import GENERATOR, unwrapped
from hpc_det.view.resume_causes import causes
from hpc_det.view.resume_check import Comparison, compare
from tests.view.resume_traces import USUAL, Change, trace

BATCHES = 6


def training(folder: Path, resumes: tuple[int, ...] = (), change: Change | None = None, ranks: int = 1) -> TrialFolder:
    trial = TrialFolder(folder / "trials" / "1")
    trace(trial, BATCHES, resumes, change, ranks)
    return trial


def from_batch(first: int, part: str, **values: str) -> dict[tuple[int, str], Mapping[str, str]]:
    return {(batch, part): values for batch in range(first, BATCHES)}


def compared(tmp_path: Path, stopped: Change, undisturbed: Change | None = None, resumes: Any = (2, 4)) -> Comparison:
    one = training(tmp_path / "1", change=undisturbed)
    return compare(one, training(tmp_path / "2", resumes, stopped))


def test_trainings_with_the_same_bits_are_identical(tmp_path: Path) -> None:
    found = compared(tmp_path, {})
    assert found.is_identical
    assert found.resumes == (2, 4)
    assert found.batches == BATCHES
    assert causes(found) == []


def test_the_first_difference_is_the_earliest_batch_and_of_that_what_came_first(tmp_path: Path) -> None:
    later = from_batch(3, "metrics", **{"['loss']": "2.0"})
    found = compared(tmp_path, {**later, **from_batch(4, "state", weights="0.7"), (3, "data"): {"[0]": "y"}})
    (first,) = found.first
    assert (first.batch, first.part, first.name) == (3, "data", "[0]")
    assert (first.undisturbed, first.stopped, first.rank) == ("x", "y", 0)


def test_what_was_done_again_after_a_crash_counts_as_it_was_done_last(tmp_path: Path) -> None:
    one, other = training(tmp_path / "1"), training(tmp_path / "2", change={(BATCHES - 1, "data"): {"[0]": "y"}})
    for line in (
        {"batch": 5, "attempt": 2, "first": True, **USUAL},
        {"batch": 6, "state": USUAL["state"], "first": False},
    ):
        append_line(other.resume_trace(0), line)
    assert compare(one, other).is_identical


def test_an_attribute_that_a_resume_loses_is_named_even_where_it_has_no_effect(tmp_path: Path) -> None:
    name = "attribute trial.count"
    counted = {(batch, "state"): {name: str(batch)} for batch in range(BATCHES)}
    reset = {(batch, "state"): {name: str(batch - 2 * (batch >= 2))} for batch in range(BATCHES)}
    found = compared(tmp_path, reset, counted)
    assert found.is_identical
    (lost,) = found.lost
    assert (lost.batch, lost.name, lost.undisturbed, lost.stopped) == (2, name, "2", "0")
    assert name in causes(found)[0].what


def test_an_attribute_that_differs_from_the_start_is_not_lost(tmp_path: Path) -> None:
    started = {(batch, "state"): {"attribute trial.started": "12:00"} for batch in range(BATCHES)}
    found = compared(tmp_path, {key: {"attribute trial.started": "12:01"} for key in started}, started)
    assert found.is_identical
    assert found.lost == ()


def test_a_validation_of_another_value_is_a_difference(tmp_path: Path) -> None:
    trials = training(tmp_path / "1"), training(tmp_path / "2", (2,))
    for trial, error in zip(trials, (0.25, 0.5), strict=True):
        line = {"kind": "validation", "steps": 4, "metrics": {"error": error}, "attempt": 1, "time": 1.0}
        append_line(trial.metrics, line)
    (first,) = compare(*trials).first
    assert (first.batch, first.part, first.name, first.rank) == (4, "validation", "error", None)
    assert (first.undisturbed, first.stopped) == ("0.25", "0.5")


def test_a_rank_that_differs_is_found(tmp_path: Path) -> None:
    one, other = training(tmp_path / "1", ranks=2), training(tmp_path / "2", ranks=2)
    lines = other.resume_trace(1).read_text().replace('"1.0"', '"2.0"')
    other.resume_trace(1).write_text(lines)
    assert {each.rank for each in compare(one, other).first} == {1}


def test_a_rank_that_is_missing_is_no_result(tmp_path: Path) -> None:
    one, other = training(tmp_path / "1", ranks=2), training(tmp_path / "2", ranks=1)
    with pytest.raises(HpcDetError):
        compare(one, other)


def test_a_list_of_times_is_not_lost_where_it_grows(tmp_path: Path) -> None:
    """The list grows by one entry per batch, and the entries differ between the runs."""
    changes: list[Change] = [
        {(batch, "state"): {f"attribute trial.times[{k}]": f"{run}.{k}" for k in range(batch)} for batch in range(6)}
        for run in (1, 2)
    ]
    assert compared(tmp_path, changes[1], changes[0]).lost == ()


def test_of_the_entries_of_a_list_that_is_lost_the_first_is_named(tmp_path: Path) -> None:
    seen = {(batch, "state"): {f"attribute trial.seen[{k}]": str(k) for k in range(9)} for batch in range(BATCHES)}
    found = compared(tmp_path, {place: values for place, values in seen.items() if place[0] < 2}, seen)
    assert [each.name for each in found.lost] == ["attribute trial.seen[0]"]
    assert len(causes(found)) == 1


def test_trainings_that_left_no_trace_cannot_be_compared(tmp_path: Path) -> None:
    one = training(tmp_path / "1")
    with pytest.raises(HpcDetError):
        compare(one, TrialFolder(tmp_path / "none" / "trials" / "1"))


NOISE = "attribute training data loader.dataset.noise"
LOSS, POINT = {"['loss']": "2"}, {"[0]": "y"}


def counted(resume: int | None = None, name: str = "attribute trial.count", text: str = "") -> Change:
    """Return a change: a value that grows with each batch and that a resume loses."""
    return {(batch, "state"): {name: f"{text}{batch - (resume or 0)}"} for batch in range(resume or 0, BATCHES)}


def also(*changes: Change) -> Change:
    """Return one change with all of these."""
    found: dict[tuple[int, str], dict[str, str]] = {}
    for change in changes:
        for place, values in change.items():
            found.setdefault(place, {}).update(values)
    return found


Case = tuple[Change, Change, list[tuple[str, str | None]]]
"""Changes of the stopped and of the undisturbed training, and the expected causes as (kind, name)."""


def in_an_unwrapped(kind: str) -> Case:
    name = f"attribute t.a {unwrapped(kind)}['x']"
    stopped = also(counted(2, name), from_batch(2, "metrics", **LOSS))
    return stopped, counted(0, name), [(kind, "attribute t.a")]


CAUSES: list[Case] = [
    (from_batch(2, "data", **POINT), {}, [("data", None)]),
    (from_batch(2, "metrics", **LOSS), {}, [("hidden state", None), ("nondeterminism", None)]),
    (from_batch(3, "state", weights="2"), {}, [("hidden state", None), ("nondeterminism", None)]),
    (from_batch(3, "metrics", **LOSS), {}, [("nondeterminism", None), ("hidden state", None)]),
    (from_batch(1, "metrics", **LOSS), {}, [("nondeterminism", None)]),
    (from_batch(1, "data", **POINT), {}, [("data", None)]),
    (from_batch(1, "state", **{"generators['torch']": "b"}), {}, [("nondeterminism", None)]),
    (from_batch(2, "state", weights="2"), {}, [("not restored", "weights")]),
    (
        also({(0, "state"): {NOISE: f"{GENERATOR} 2"}}, from_batch(0, "data", **POINT)),
        {(0, "state"): {NOISE: f"{GENERATOR} 1"}},
        [("generator", NOISE)],
    ),
    (also(counted(2), from_batch(2, "metrics", **LOSS)), counted(), [("state", "attribute trial.count")]),
    (also(counted(2), from_batch(2, "data", **POINT)), counted(), [("data", None), ("state", "attribute trial.count")]),
    (also(counted(2, NOISE), from_batch(2, "data", **POINT)), counted(0, NOISE), [("state", NOISE)]),
    (also(counted(2), from_batch(2, "state", weights="2")), counted(), [("not restored", "weights")]),
    (also(counted(2), from_batch(1, "metrics", **LOSS)), counted(), [("nondeterminism", None)]),
    (
        also(counted(2, "attribute t.g", GENERATOR), from_batch(2, "metrics", **LOSS)),
        counted(0, "attribute t.g", GENERATOR),
        [("generator", "attribute t.g")],
    ),
    *map(in_an_unwrapped, ("module", "optimizer", "scheduler", "scaler")),
]


@pytest.mark.parametrize(("stopped", "undisturbed", "expected"), CAUSES)
def test_the_likely_cause_depends_on_what_differs_and_since_when(
    tmp_path: Path, stopped: Change, undisturbed: Change, expected: list[tuple[str, str | None]]
) -> None:
    found = causes(compared(tmp_path, also(undisturbed, stopped), undisturbed, (2,)))
    assert [(cause.kind, cause.name) for cause in found] == expected
    assert all(cause.remedy for cause in found)


def test_state_that_is_lost_after_the_first_difference_is_no_cause_of_it(tmp_path: Path) -> None:
    """The resume at batch 4 loses a counter, but the data have differed since the resume at batch 2."""
    lost_later = {place: value for place, value in counted(4).items() if place[0] >= 4}
    found = compared(tmp_path, also(counted(), lost_later, from_batch(3, "data", **POINT)), counted())
    assert [each.batch for each in found.lost] == [4]
    assert [cause.kind for cause in causes(found)] == ["data"]


# --- scripts


def script(folder: Path, lines: list[dict[str, Any]], turns: list[dict[str, int]] | None = None) -> TrialFolder:
    trial = TrialFolder(folder / "trials" / "1")
    trial.resume_trace(0).parent.mkdir(parents=True)
    for line in lines:
        append_line(trial.resume_trace(0), {"attempt": 1, "first": False, "loop": True, **line})
    for turn in turns or []:
        append_line(trial.resume_stops, turn)
    return trial


def with_variables(batch: int, first: bool = False, **values: str) -> dict[str, Any]:
    """Return a line before whose batch these variables have values; those with the value "" are empty containers."""
    state = {f"variable main.{name}": value for name, value in values.items() if value}
    return {"batch": batch, "first": first, "state": state, "variables": [f"variable main.{name}" for name in values]}


def test_a_variable_that_has_no_value_after_a_resume_is_not_lost(tmp_path: Path) -> None:
    one = script(tmp_path / "1", [with_variables(0, first=True), with_variables(1, loss="0.5", losses="0.5")])
    resumed = [with_variables(0, first=True), with_variables(1, first=True, losses="")]
    found = compare(one, script(tmp_path / "2", resumed, [{"batch": 1}, {"resumed": 1}]))
    assert [each.name for each in found.lost] == ["variable main.losses"]
    assert (found.is_script, found.resumes, found.repeated) == (True, (1,), ())


def test_a_stop_after_which_a_script_begins_earlier_is_named(tmp_path: Path) -> None:
    lines = [with_variables(batch, first=batch == 0) for batch in range(6)]
    turns = [{"batch": 3}, {"resumed": 0}, {"resumed": 2}, {"batch": 5}, {"resumed": 5}]
    found = compare(script(tmp_path / "1", lines), script(tmp_path / "2", lines, turns))
    assert found.repeated == ((3, 0),)


def test_only_steps_at_which_both_trainings_ask_for_stops_are_compared(tmp_path: Path) -> None:
    def asks(batch: int, value: str) -> dict[str, Any]:
        return {"batch": batch, "state": {"model: weight": value}, "calls": True}

    one = script(tmp_path / "1", [asks(2, "1"), asks(4, "2"), asks(6, "3")])
    other = script(tmp_path / "2", [asks(2, "1"), asks(5, "9"), asks(6, "4")])
    (first,) = compare(one, other).first
    assert (first.batch, first.undisturbed, first.stopped) == (6, "3", "4")
