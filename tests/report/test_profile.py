"""The report's breakdown of the trials' time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpc_det.report.facts import MOST_COLUMNS, course_of, facts
from hpc_det.report.page import page
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.life import Life, random_search
from tests.facts import unnamed
from tests.report.test_page import Outline
from tests.view.performance.profiles import BEGAN, gpus, profiled, sample, stretch


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Return an experiment with two trials, of which the second is better."""
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    for worker in (0, 1):
        life.begins(worker)
        life.reaches(0.8 + worker / 10, worker=worker)
    return life


def facts_of(life: Life) -> dict[str, Any]:
    found = facts(ExperimentView(life.folder), ExperimentState.COMPLETED, BEGAN + 1e6)
    assert json.loads(json.dumps(found, allow_nan=False))
    return found


def test_the_best_trial_that_was_profiled_is_shown_over_its_batches(life: Life) -> None:
    for trial in (1, 2):
        profiled(life.folder.trial(trial))
    found = facts_of(life)
    assert [trial["profile"]["verdict"] for trial in found["trials"]] == ["data loader bound"] * 2
    course = found["course"]
    assert (course["trial"], course["rank"], course["host"]) == (2, 1, "n1")
    assert [(column["first"], column["last"]) for column in course["columns"]] == [
        (0, 100),
        (100, 200),
        (200, 300),
        (300, 400),
    ]
    assert course["columns"][0]["seconds"]["loading"] == pytest.approx(6.3)
    assert [batches for batches, *_ in course["system"]["gpu_util"]] == [100, 200, 300, 400]


def test_where_the_best_one_was_not_profiled_another_is_shown(life: Life) -> None:
    profiled(life.folder.trial(1))
    found = facts_of(life)
    assert (found["course"]["trial"], found["trials"][1]["profile"]) == (1, None)


def test_a_trial_whose_timings_are_missing_is_not_shown_over_batches(life: Life) -> None:
    sample(life.folder.trial(1), at=0)
    found = facts_of(life)
    assert found["course"] is None
    assert found["trials"][0]["profile"]["verdict"] == "not measured"
    assert "not measured" in page(found)


def test_many_stretches_are_drawn_together(life: Life) -> None:
    trial = life.folder.trial(1)
    for number in range(1, 2 * MOST_COLUMNS + 8):
        stretch(trial, batches=10 * number, count=10, wall_s=1.0, seconds={"train_batch": 0.5})
    columns = course_of(trial)["columns"]
    assert len(columns) == MOST_COLUMNS
    assert [column["first"] for column in columns[1:]] == [column["last"] for column in columns[:-1]]
    assert sum(sum(column["seconds"].values()) for column in columns) == pytest.approx(2 * MOST_COLUMNS + 7)


def test_the_page_has_a_bar_for_each_trial_and_pictures_of_the_one_that_is_shown(life: Life) -> None:
    for trial in (1, 2):
        profiled(life.folder.trial(trial), hosts=("n1", "n2"))
    shown = page(facts_of(life))
    assert Outline(shown).open == []
    section = shown.partition('id="profile"')[2].partition("</section>")[0]
    pictures = re.findall(r"<svg [^>]*role=\"img\"[^>]*><title>([^<]+)</title>", section)
    assert len(pictures) == section.count("<svg ") == 2 + 1 + 9
    assert [unnamed(text, "trial") for text in pictures[:2]] == [[], []]
    assert not unnamed(pictures[2], "batches", "computing")
    assert any(not unnamed(text, "GPUs", "%", "batches", 28, 34) for text in pictures)
    assert "DataLoader(..., num_workers=3, persistent_workers=True)" in section


def test_names_of_callbacks_and_hosts_stay_text(life: Life) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    stretch(life.folder.trial(1), host=hostile, seconds={f"callbacks.{hostile}": 5.0})
    shown = page(facts_of(life))
    assert "img" not in Outline(shown).tags
    assert "&lt;img" in shown


def test_a_single_stretch_and_a_single_sample_are_a_picture_too(life: Life) -> None:
    stretch(life.folder.trial(1))
    sample(life.folder.trial(1), at=5, gpus=gpus(a=50.0))
    assert Outline(page(facts_of(life))).open == []
