"""What differs first between two trainings, by the traces of their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.resume_check.causes import GENERATOR, OPTIMIZER, causes
from hpc_det.resume_check.comparison import Comparison, compare
from hpc_det.store.files import append_line
from hpc_det.store.folders import TrialFolder

Change = Mapping[tuple[int, str], Mapping[str, str]]
"""Batch and part -> values that are otherwise."""
BATCHES = 6
USUAL = {"state": {"weights": "0.5", "generators['torch']": "a"}, "data": {"[0]": "x"}, "metrics": {"['loss']": "1.0"}}


def training(folder: Path, resumes: tuple[int, ...] = (), change: Change | None = None, ranks: int = 1) -> TrialFolder:
    """What a training of `BATCHES` leaves on disk."""
    trial = TrialFolder(folder / "trials" / "1")
    trial.resume_trace(0).parent.mkdir(parents=True)
    for rank in range(ranks):
        for batch in range(BATCHES):
            parts = {part: values | dict((change or {}).get((batch, part), {})) for part, values in USUAL.items()}
            first = batch in (0, *resumes)
            append_line(trial.resume_trace(rank), {"batch": batch, "attempt": 1, "first": first, **parts})
        append_line(trial.resume_trace(rank), {"batch": BATCHES, "attempt": 1, "first": False, "state": USUAL["state"]})
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


def test_trainings_that_left_no_trace_cannot_be_compared(tmp_path: Path) -> None:
    one = training(tmp_path / "1")
    with pytest.raises(HpcDetError):
        compare(one, TrialFolder(tmp_path / "none" / "trials" / "1"))


OWN = "training data loader.dataset.noise"


@pytest.mark.parametrize(
    ("stopped", "undisturbed", "resumes", "word"),
    [
        (from_batch(2, "data", **{"[0]": "y"}), {}, (2,), "workers"),
        (from_batch(2, "metrics", **{"['loss']": "2"}), {}, (2,), "closure"),
        (from_batch(3, "metrics", **{"['loss']": "2"}), {}, (2,), "kernel"),
        (from_batch(1, "metrics", **{"['loss']": "2"}), {}, (2,), "kernel"),
        (from_batch(1, "data", **{"[0]": "y"}), {}, (2,), "unseeded worker"),
        (from_batch(2, "state", weights="2"), {}, (2,), "weights"),
        (from_batch(1, "state", **{"generators['torch']": "b"}), {}, (2,), "random numbers"),
        (
            {(0, "state"): {f"attribute {OWN}": f"{GENERATOR} 2"}, **from_batch(0, "data", **{"[0]": "y"})},
            {(0, "state"): {f"attribute {OWN}": f"{GENERATOR} 1"}},
            (2,),
            OWN,
        ),
        (
            from_batch(2, "metrics", **{"['loss']": "2"})
            | from_batch(2, "state", **{f"attribute t.a {OPTIMIZER}": "1"}),
            from_batch(2, "state", **{f"attribute t.a {OPTIMIZER}": "2"}),
            (2,),
            "an optimizer",
        ),
    ],
)
def test_the_likely_cause_depends_on_what_differs_and_since_when(
    tmp_path: Path, stopped: Change, undisturbed: Change, resumes: tuple[int, ...], word: str
) -> None:
    (cause,) = causes(compared(tmp_path, stopped, undisturbed, resumes))
    assert word in cause.what
    assert cause.remedy
