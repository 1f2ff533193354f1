from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

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


def test_several_experiments_are_compared_on_one_page(
    root: Path, hpc_det: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        life = Life.submitted(root)
        life.begins()
        life.reports("validation", 100, {"accuracy": 0.5})
        life.finishes()
    monkeypatch.chdir(tmp_path)
    assert hpc_det("report", "1", "3").succeeds("report-1-3.html")
    assert "<title>Experiments 1, 3</title>" in Path("report-1-3.html").read_text()
    assert hpc_det("report", "1-3", "2", "-o", "all.html").succeeds("all.html")
    assert "<title>Experiments 1, 2, 3</title>" in Path("all.html").read_text()
    assert [facts["id"] for facts in json.loads(hpc_det("report", "1", "2", "--json").out)] == [1, 2]
    assert hpc_det("report", "1", "9").fails(2, "experiment 9", "not found")


def test_a_watched_report_is_updated_until_the_experiment_ends(
    life: Life, hpc_det: Command, scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.begins()
    pages: list[str] = []
    file = tmp_path / "report.html"

    def passes(seconds: float) -> None:
        pages.append(file.read_text())
        if len(pages) == 1:
            life.reports("validation", 100, {"accuracy": 0.123})
        else:
            life.finishes()

    # not time.sleep itself, which threads of other tests may call
    monkeypatch.setattr("hpc_det.cli.report.time", SimpleNamespace(time=time.time, sleep=passes))
    assert hpc_det("report", 1, "-o", file, "--watch", "--every", 5).succeeds("report.html", "every 5 s", "Ctrl-C")
    assert ["0.123" in page for page in pages] == [False, True]
    assert all('data-refresh="5.0"' in page for page in pages)
    assert "data-refresh" not in file.read_text()
    assert "COMPLETED" in file.read_text()


def test_ctrl_c_leaves_a_page_that_no_longer_reloads(
    life: Life, hpc_det: Command, scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.begins()

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpc_det.cli.report.time", SimpleNamespace(time=time.time, sleep=interrupted))
    file = tmp_path / "report.html"
    assert hpc_det("report", 1, "-o", file, "--watch").code == 130
    assert "data-refresh" not in file.read_text()


def test_facts_are_not_watched(life: Life, hpc_det: Command) -> None:
    assert hpc_det("report", 1, "--json", "--watch").fails(2, "--watch", "--json")
    assert hpc_det("report", 1, "--every", 5).fails(2, "--every", "--watch")


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
