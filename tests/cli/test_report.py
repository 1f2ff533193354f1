from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_det.requeue import Action, Cause
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed


def test_a_report_is_one_page_in_the_current_folder(
    life: Life, hpc_det: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.begins()
    life.finishes()
    monkeypatch.chdir(tmp_path)
    found = hpc_det("report", 1)
    assert (found.code, found.err) == (0, "")
    size = Path("report-1.html").stat().st_size
    assert not unnamed(found.out, "report-1.html", f"{size / 1024:.1f} KiB")
    page = (tmp_path / "report-1.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>Experiment 1: digits</title>" in page


def test_a_report_goes_where_it_is_wanted_and_takes_the_place_of_the_last_one(
    life: Life, hpc_det: Command, tmp_path: Path
) -> None:
    life.begins()
    life.finishes()
    file = tmp_path / "mine.html"
    file.write_text("the last one")
    assert hpc_det("report", 1, "-o", file).code == 0
    assert file.read_text().startswith("<!DOCTYPE html>")
    assert [entry.name for entry in tmp_path.iterdir() if "mine" in entry.name] == ["mine.html"]


def test_a_report_of_what_runs_shows_what_there_is_now(life: Life, hpc_det: Command, scheduler: FakeScheduler) -> None:
    life.begins()
    life.reports("validation", 100, {"accuracy": 0.9})
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=100)
    facts = json.loads(hpc_det("report", 1, "--json").out)
    assert facts["state"] == "RUNNING"
    (trial,) = facts["trials"]
    assert trial["validation"] == {"accuracy": [[100, 0.9]]}
    assert [span["phase"] for span in trial["spans"]] == ["queued", "unknown", "queued"]


def test_the_facts_are_json_and_no_file_is_written(life: Life, hpc_det: Command, tmp_path: Path) -> None:
    life.begins()
    life.finishes()
    before = sorted(tmp_path.iterdir())
    facts = json.loads(hpc_det("report", 1, "--json").out)
    assert (facts["id"], facts["state"], len(facts["trials"])) == (1, "COMPLETED", 1)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_not_there_is_named(life: Life, hpc_det: Command, tmp_path: Path) -> None:
    life.begins()
    life.finishes()
    found = hpc_det("report", 1, "-o", tmp_path / "missing" / "report.html")
    assert found.code == 2
    assert not unnamed(found.err, "--output", f"{tmp_path}/missing/report.html")


def test_an_experiment_that_does_not_exist_is_told(hpc_det: Command, root: Path) -> None:
    found = hpc_det("report", 7)
    assert found.code == 2
    assert "experiment 7: not found" in found.err
