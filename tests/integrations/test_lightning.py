"""Lightning's Trainer: a run that is stopped and resumed ends with the same bits as one that is not."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.metrics import read_reports
from tests.e2e.story import Story, hpc_det
from tests.integrations.forked_runs import Cell, Results, results_of

pytestmark = [pytest.mark.integration, pytest.mark.skipif(find_spec("lightning") is None, reason="no lightning")]

HERE = Path(__file__).parent
SCRIPTS = ("training", "lightning_training", "fabric_training")
"""Modules of the script of a job."""
CELLS: dict[str, Cell] = {
    "in the middle and at the end of a pass": {"stops": [8, 12], "workers": 2, "trainer": {"val_check_interval": 4}},
    "two ranks": {"stops": [8], "ranks": 2},
}
FABRIC: Cell = {"stops": [8], "ranks": 2, "fabric": True}
MORE: dict[str, Cell] = {
    "no worker": {"stops": [8, 10, 12]},
    "accumulation": {"stops": [5, 9], "trainer": {"accumulate_grad_batches": 2, "val_check_interval": 2}},
    "max_steps": {"stops": [3, 6, 13], "trainer": {"max_epochs": -1, "max_steps": 15}},
    "first and last batch": {"stops": [1, 17], "workers": 1},
    "two ranks, end of a pass, workers": {"stops": [6, 12, 13], "ranks": 2, "workers": 2},
    "held back by min_epochs": {"stops": [2], "trainer": {"min_epochs": 3}},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    return results_of(
        "tests.integrations.lightning_training", tmp_path_factory.mktemp("runs"), {**CELLS, "fabric": FABRIC}
    )


@pytest.mark.parametrize("name", CELLS)
def test_a_stopped_and_resumed_run_is_the_whole_run_to_the_bit(results: dict[str, Results], name: str) -> None:
    _check(results[name], CELLS[name])


@pytest.mark.long
def test_so_is_it_in_more_cases(tmp_path: Path) -> None:
    for name, found in results_of("tests.integrations.lightning_training", tmp_path, MORE).items():
        _check(found, MORE[name])


def _check(found: Results, cell: Cell) -> None:
    assert found.resumed == found.whole
    accumulate = cell.get("trainer", {}).get("accumulate_grad_batches", 1)
    steps = [-(-stop // accumulate) * accumulate for stop in cell["stops"]]
    assert [attempt[0]["step"] for attempt in found.stopped] == steps
    assert {rank["stop"] for attempt in found.stopped for rank in attempt} == {"preempted"}


def test_so_is_a_loop_with_fabric(results: dict[str, Results]) -> None:
    _check(results["fabric"], FABRIC)


def test_a_correct_resume_shows_no_warning_of_lightning(results: dict[str, Results]) -> None:
    assert "not resumable" not in (results["two ranks"].root / "resumed-0.log").read_text()


def test_a_file_of_model_checkpoint_is_kept(results: dict[str, Results]) -> None:
    assert all(rank["best"] for name in CELLS for rank in results[name].resumed)


def test_every_metric_is_reported_once(results: dict[str, Results]) -> None:
    for found in map(results.__getitem__, CELLS):
        reports = [list(read_reports(ExperimentStore(root).folder(1).trial().metrics)) for root in _roots(found)]
        assert [_facts(each) for each in reports[1:]] == [_facts(reports[0])]
        training = [record for record in reports[0] if record["kind"] == "training"]
        assert [record["steps"] for record in training] == [*range(1, 19)]
        assert all({*record["metrics"]} == {"loss"} for record in training)
        validations = [record for record in reports[0] if record["kind"] == "validation"]
        assert validations[-1]["steps"] in (16, 18)
        assert all({*record["metrics"]} == {"val_loss"} for record in validations)


def test_the_last_checkpoint_has_the_position_and_no_signal_ended_a_run(results: dict[str, Results]) -> None:
    for found in map(results.__getitem__, CELLS):
        newest = committed(ExperimentStore(found.root).folder(1).trial().checkpoints)[0]
        assert newest.steps == 18
        metadata = json.loads((newest.path / "metadata.json").read_text())
        assert metadata["hpc_det.lightning"] == {"epoch": 3, "records": 0}


@pytest.mark.long
def test_a_paused_and_activated_experiment_ends_with_the_same_bits(results: dict[str, Results], tmp_path: Path) -> None:
    job, code = HERE / "lightning_job", tmp_path / "code"
    shutil.copytree(job, code)
    (code / "tests" / "integrations").mkdir(parents=True)
    for name in ("__init__", "integrations/__init__", *(f"integrations/{name}" for name in SCRIPTS)):
        shutil.copy(HERE.parent / f"{name}.py", code / "tests" / f"{name}.py")
    story = Story.begin(config=code / "job.yaml", context=code)
    story.until_batch(6)
    hpc_det("experiment", "pause", story.number)
    story.until_ended(1)
    hpc_det("experiment", "activate", story.number)
    story.wait()
    assert story.causes == ["paused", "finished"]
    for rank in range(2):
        (line,) = [line for line in story.trial.rank_log(2, rank).read_text().splitlines() if "RESULT" in line]
        assert json.loads(line.partition("RESULT ")[2]) == results["two ranks"].whole[rank]


def _roots(found: Results) -> tuple[Path, Path]:
    return found.root.with_name("whole"), found.root


def _facts(records: list[dict[str, Any]]) -> list[object]:
    return [[record[name] for name in ("kind", "steps", "metrics")] for record in records]
