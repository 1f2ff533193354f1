"""A search of `tune_run` is an experiment to the commands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.cli.experiment.delete import delete_one
from hpc_det.client.stopping import kill_trial, pause_one
from hpc_det.node.json_files import append_line
from hpc_det.report.facts import facts
from hpc_det.sgd.tune import choice, grid_search, pbt, tune_run
from hpc_det.sgd.tune.files import ITERATION, TuneFolder
from hpc_det.store.experiments import ExperimentStore
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.metrics import read_reports
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import summary
from hpc_det.view.trial_facts import TrialFacts, trials_of
from hpc_det.view.watch import state
from tests.sgd.tune.trainables import Fragile, Line
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

THREE = {"training_iteration": 3}


def the_only(root: Path) -> ExperimentFolder:
    (experiment,) = ExperimentStore(root).all()
    return experiment


def trials(experiment: ExperimentFolder) -> list[TrialFacts]:
    view = ExperimentView(experiment)
    return list(trials_of(view, state(view)))


def test_a_search_is_listed_with_its_trials_and_deleted_with_its_run(
    state_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    tune_run(Fragile, config={"rate": grid_search([-1.0, 2.0])}, stop=THREE, metric="loss", run=run)
    experiment = the_only(state_folder)
    assert f"experiment {experiment.id};" in capsys.readouterr().out
    view = ExperimentView(experiment)
    assert state(view) is ExperimentState.COMPLETED
    shown = summary(view, ExperimentState.COMPLETED)
    assert shown.best == {"metric": "loss", "value": 4.0, "batches": None, "trial": 2}
    failed, completed = trials(experiment)
    assert [each.state.value for each in (failed, completed)] == ["ERROR", "COMPLETED"]
    assert failed.attempts[0].failure == "ValueError: the loss grows"
    assert "the loss grows" in failed.folder.rank_log(1, 0).read_text()
    assert completed.hparams == {"rate": 2.0}
    assert [each.cause for each in completed.attempts] == ["failed", "finished"]  # it died once
    assert [report["steps"] for report in read_reports(completed.folder.metrics)] == [1, 2, 3]
    assert completed.checkpoints()[0].steps == 3
    assert facts(view, ExperimentState.COMPLETED, now=0.0)
    delete_one(experiment)
    assert not run.exists()


def test_a_search_without_a_metric_has_no_best_trial(state_folder: Path, tmp_path: Path) -> None:
    tune_run(Line, config={"rate": grid_search([1.0, 2.0])}, stop={ITERATION: 1}, run=tmp_path / "run")
    view = ExperimentView(the_only(state_folder))
    assert state(view) is ExperimentState.COMPLETED
    assert summary(view, ExperimentState.COMPLETED).best is None


def test_a_population_is_listed_with_its_best_trial(state_folder: Path, tmp_path: Path) -> None:
    config = {"rate": choice([1.0, 2.0])}
    for _ in range(2):  # the second one resumes the first
        tune_run(
            Line, config=config, searcher=pbt(), num_samples=2, stop={ITERATION: 2}, metric="loss", run=tmp_path / "run"
        )
    view = ExperimentView(the_only(state_folder))
    assert state(view) is ExperimentState.COMPLETED
    best = summary(view, ExperimentState.COMPLETED).best
    assert best
    assert best["metric"] == "loss"


PROGRAM = """
import sys
from hpc_det.sgd.tune import grid_search, tune_run
from tests.sgd.tune.trainables import Slow

tune_run(Slow, config={"rate": grid_search([1.0, 2.0])}, stop={"training_iteration": 3}, metric="loss",
         max_concurrent=2, run=sys.argv[1])
"""


def test_commands_end_a_trial_and_pause_the_search_which_then_continues(state_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [sys.executable, "-c", PROGRAM, str(run)]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as driver:
        wait_for(lambda: (run / "trials" / "1" / "began-2").exists(), DEADLINE_S)
        wait_for(lambda: (run / "trials" / "2" / "began-2").exists(), DEADLINE_S)
        experiment = the_only(state_folder)
        assert state(ExperimentView(experiment)) is ExperimentState.RUNNING
        kill_trial(experiment.trial(2))
        wait_for(lambda: trials(experiment)[1].state.value == "CANCELED", DEADLINE_S)
        pause_one(experiment)
        assert "SearchStopped" in driver.communicate(timeout=DEADLINE_S)[1]
    assert state(ExperimentView(experiment)) is ExperimentState.PAUSED
    assert [each.state.value for each in trials(experiment)] == ["PAUSED", "CANCELED"]
    assert trials(experiment)[0].worker is None
    (run / "go").touch()
    subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
    assert state(ExperimentView(experiment)) is ExperimentState.COMPLETED
    assert [each.state.value for each in trials(experiment)] == ["COMPLETED", "CANCELED"]
    assert the_only(state_folder) == experiment


def test_processes_of_trials_do_not_load_torch() -> None:
    code = "import sys, hpc_det.sgd.tune.trial; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_results_of_an_earlier_version_are_read_and_converted(tmp_path: Path) -> None:
    trial = TuneFolder(tmp_path).trial(1)
    trial.path.mkdir(parents=True)
    results = [{ITERATION: number, "loss": 1.0 / number, "time": 5.0} for number in (1, 2)]
    for result in results:
        append_line(trial.metrics, result)
    assert trial.results() == results
    trial.convert()
    assert trial.results() == results
    assert [report["metrics"] for report in read_reports(trial.metrics)] == [{"loss": 1.0}, {"loss": 0.5}]
