"""Commands of this hpc_det on files that a newer one has written: a sentence, and the other experiments as usual."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.cli.top.experiments import Answers, Experiments
from hpc_det.client import api
from hpc_det.node.format_version import KEY
from hpc_det.node.json_files import write_json
from hpc_det.requeue import Action, Cause
from hpc_det.store.experiments import ExperimentStore
from hpc_det.view.summary import NEWER
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed

FILES: dict[str, Callable[[Life], Path]] = {
    "effective.json": lambda life: life.folder.effective,
    "plan.json": lambda life: life.folder.plan,
    "about.json": lambda life: life.folder.about,
    "the search": lambda life: life.folder.search / "000000000.json",
    "jobs/1.json": lambda life: life.folder.job(),
    "trial.json": lambda life: life.trial.trial,
    "journal.jsonl": lambda life: life.trial.journal,
    "metrics.jsonl": lambda life: life.trial.metrics,
    "stop.json": lambda life: life.trial.stop,
    "a manifest": lambda life: next(life.trial.checkpoints.glob("*/manifest.json")),
}
HIDING = ("effective.json", "about.json", "the search", "jobs/1.json", "journal.jsonl", "metrics.jsonl")
"""Files without which a list has nothing to show of the experiment."""
COMMANDS = (
    *(("experiment", "list"), ("experiment", "describe", "1"), ("experiment", "list-trials", "1")),
    *(("experiment", "list-checkpoints", "1"), ("experiment", "logs", "1"), ("report", "1", "--json")),
    *(("trial", "describe", "1/1"), ("trial", "logs", "1/1"), ("task", "list")),
)


@pytest.fixture
def two(root: Path, life: Life, scheduler: FakeScheduler) -> Life:
    """Return experiment 1, and create another one, which is finished."""
    life.begins()
    life.trains_from(0)
    life.reports("training", 10, {"loss": 1.0}, samples_per_second=4.0)
    life.reports("validation", 10, {"accuracy": 0.5}, seconds=1.0)
    life.saves(10)
    life.rank_prints(0, "hello\n")
    write_json(life.folder.about, {"name": "digits"})
    write_json(life.trial.stop, {"attempt": 1, "reason": "pause", "source": "ada", "time": 1.0})
    other = Life.submitted(root, title="other")
    other.begins()
    other.finishes()
    return life


def make_newer(path: Path) -> None:
    """Rewrite a file as a hpc_det that knows version 9 of this file writes it, with a content that is unknown today."""
    if path.name == "manifest.json":
        from hpc_det.checkpoint.committed import FORMAT

        path.write_text(json.dumps(FORMAT.seal.sealed({KEY: 9, "parts": []})))
    else:
        path.write_text(json.dumps({KEY: 9, "parts": []}) + "\n")


@pytest.mark.integration
@pytest.mark.parametrize("file", FILES)
def test_a_newer_file_is_a_sentence_and_hides_no_other_experiment(two: Life, hpc_det: Command, file: str) -> None:
    path = FILES[file](two)
    make_newer(path)
    failed = []
    for command in COMMANDS:
        shown = hpc_det(*command)
        lines = shown.err.splitlines()
        if shown.code and unnamed(shown.err, path if file != "the search" else two.folder.search, 9, 1, "upgrade"):
            failed.append((command, shown))
        if "Traceback" in shown.err or len(lines) > 3:
            failed.append((command, shown))
    assert not failed, "\n".join(map(str, failed))
    one, other = json.loads(hpc_det("experiment", "list", "--json").out)
    assert (other["name"], other["state"]) == ("other", "COMPLETED")
    assert (one["name"] == NEWER) is (file in HIDING)


@pytest.mark.parametrize("file", ["effective.json", "the search"])
def test_a_newer_experiment_that_has_ended_is_neither_continued_nor_changed(
    root: Path, life: Life, hpc_det: Command, scheduler: FakeScheduler, file: str
) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP)
    make_newer(FILES[file](life))
    before = {path: path.read_bytes() for path in life.folder.path.rglob("*") if path.is_file()}
    assert hpc_det("experiment", "continue", "1").fails(2, "format version 9", "upgrade")
    assert {path: path.read_bytes() for path in life.folder.path.rglob("*") if path.is_file()} == before


def test_top_and_the_client_show_the_others(two: Life, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_newer(two.folder.effective)
    rows = Experiments(ExperimentStore(root), Answers(root)).look().rows
    assert {row.summary.id: row.summary.name for row in rows} == {1: NEWER, 2: "other"}
    assert [experiment.id for experiment in api.list()] == [2]
    assert unnamed(capfd.readouterr().err, "experiment 1") == []
