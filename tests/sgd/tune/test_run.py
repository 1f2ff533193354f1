from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import submitit

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.schedulers.scheduler import CommandError
from hpc_det.sgd.tune import Analysis, asha, choice, grid_search, pbt, tune_run, uniform
from hpc_det.sgd.tune.files import TuneFolder
from tests.facts import refused, unnamed
from tests.sgd.tune.trainables import Fragile, Line, Slow, Valley
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

THREE = {"training_iteration": 3}


def lengths(analysis: Analysis) -> list[int]:
    return [trial.last_result.get("training_iteration", 0) for trial in analysis.trials]


def test_a_grid_is_trained_and_the_best_config_found(tmp_path: Path) -> None:
    analysis = tune_run(
        Line,
        config={"rate": grid_search([1.0, 2.0]), "function": len},
        stop=THREE,
        metric="loss",
        max_concurrent=2,
        run=tmp_path / "run",
    )
    assert analysis.get_best_config(metric="loss", mode="min") == {"rate": 2.0}
    assert analysis.get_best_config(metric="loss", mode="max") == {"rate": 1.0}
    assert [trial.last_result["loss"] for trial in analysis.trials] == [7.0, 4.0]
    assert {row["config/rate"]: row["training_iteration"] for row in analysis.rows()} == {1.0: 3, 2.0: 3}
    assert analysis.best_checkpoint
    assert Path(analysis.best_checkpoint).read_text() == "4.0"


def test_every_point_of_the_grid_is_tried_with_each_sample(tmp_path: Path) -> None:
    analysis = tune_run(
        Line,
        config={"net": {"depth": grid_search([1, 2])}, "rate": uniform(1, 2)},
        stop={"training_iteration": 1},
        num_samples=2,
        run=tmp_path / "run",
        seed=5,
    )
    assert [trial.config["net"]["depth"] for trial in analysis.trials] == [1, 2, 1, 2]
    assert len({trial.config["rate"] for trial in analysis.trials}) == 4


def test_a_trial_ends_where_a_metric_reaches_its_stop(tmp_path: Path) -> None:
    analysis = tune_run(Line, config={"rate": choice([-1.0])}, stop={"loss": 12}, run=tmp_path / "run")
    assert [result["loss"] for result in analysis.trials[0].results] == [11.0, 12.0]


def test_a_trial_that_dies_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    (trial,) = tune_run(Fragile, config={"rate": 1.0}, stop=THREE, run=tmp_path / "run").trials
    assert [result["loss"] for result in trial.results] == [9.0, 8.0, 7.0]
    assert trial.results[0]["pid"] != trial.results[1]["pid"] == trial.results[2]["pid"]
    assert trial.status == "completed"


def test_a_trial_may_die_any_number_of_times_and_needs_no_checkpoints_in_between(tmp_path: Path) -> None:
    (trial,) = tune_run(
        Fragile, config={"rate": 1.0}, stop=THREE, max_failures=-1, checkpoint_freq=0, run=tmp_path / "run"
    ).trials
    assert trial.status == "completed"
    assert [result["loss"] for result in trial.results] == [9.0, 8.0, 7.0]
    assert len({result["pid"] for result in trial.results}) == 1, "without a checkpoint it begins anew"
    assert list(trial.checkpoints()) == [3]


def test_a_trial_that_dies_too_often_has_failed(tmp_path: Path) -> None:
    with_others = {"rate": grid_search([-1.0, 0.0, 1.0])}
    analysis = tune_run(Fragile, config=with_others, stop=THREE, max_failures=0, run=tmp_path / "run")
    assert [trial.status for trial in analysis.trials] == ["failed", "invalid hyperparameters", "failed"]
    assert [trial.error for trial in analysis.trials[:2]] == [
        "ValueError: the loss grows",
        "hpc_det.errors.InvalidHP: rate: 0 goes nowhere",
    ]
    assert unnamed(str(analysis.trials[2].error), tmp_path / "run") == [], "its log is named"
    assert lengths(analysis) == [0, 0, 1]


def test_where_every_trial_fails_the_search_says_why(tmp_path: Path) -> None:
    with refused(HpcDetError, "trial 1", "failed", "ValueError: the loss grows"):
        tune_run(Fragile, config={"rate": -1.0}, stop=THREE, run=tmp_path / "run")


def test_asha_trains_the_best_longest(tmp_path: Path) -> None:
    analysis = tune_run(
        Line,
        config={"rate": grid_search([1.0, 2.0, 3.0, 4.0])},
        stop={"training_iteration": 4},
        metric="loss",
        searcher=asha(num_rungs=3, divisor=2),
        max_concurrent=2,
        run=tmp_path / "run",
    )
    assert analysis.best_config == {"rate": 4.0}
    assert lengths(analysis)[3] == 4
    assert lengths(analysis)[0] == 1
    assert analysis.trials[0].status == "stopped"


def test_a_population_goes_on_with_copies_of_the_best(tmp_path: Path) -> None:
    analysis = tune_run(
        Fragile,
        config={"rate": grid_search([4.0, 1.0])},
        stop={"training_iteration": 4},
        metric="loss",
        searcher=pbt(interval=2, quantile=0.5),
        max_concurrent=1,
        run=tmp_path / "run",
    )
    best, worst = analysis.trials
    assert lengths(analysis) == [4, 4]
    assert [result["loss"] for result in best.results] == [6.0, 2.0, -2.0, -6.0]
    assert [result["loss"] for result in worst.results[:2]] == [9.0, 8.0]
    assert worst.results[2]["loss"] == 2.0 - worst.config["rate"]


def test_a_search_whose_driver_is_killed_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = f"""
from hpc_det.sgd.tune import grid_search, tune_run
from tests.sgd.tune.trainables import Slow
tune_run(Slow, config={{"rate": grid_search([1.0, 2.0, 3.0])}}, stop={{"training_iteration": 2 + 1}}, metric="loss",
         max_concurrent=2, run={str(run)!r})
"""
    driver = subprocess.Popen([sys.executable, "-c", script])
    second = TuneFolder(run).trial(2)
    wait_for(lambda: (second.path / "began-2").exists(), DEADLINE_S)
    driver.kill()
    driver.wait()
    (run / "go").touch()
    before = [result["pid"] for result in second.results()]
    analysis = tune_run(
        Slow,
        config={"rate": grid_search([1.0, 2.0, 3.0])},
        stop=THREE,
        metric="loss",
        max_concurrent=1,
        run=run,
    )
    assert lengths(analysis) == [3, 3, 3]
    assert [trial.last_result["loss"] for trial in analysis.trials] == [7.0, 4.0, 1.0]
    after = [result["pid"] for result in analysis.trials[1].results]
    assert after[:2] == before
    assert after[2] not in before

    (run / "go").unlink()  # finished trials are not trained again
    again = tune_run(Slow, config={"rate": grid_search([1.0, 2.0, 3.0])}, stop=THREE, metric="loss", run=run)
    assert again.best_result == analysis.best_result


def test_another_search_does_not_go_on_in_the_same_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tune_run(Line, config={"rate": 1.0}, stop={"training_iteration": 1}, run=run)
    with refused(UsageError, "hyperparameters", "2.0", "1.0"):
        tune_run(Line, config={"rate": 2.0}, stop={"training_iteration": 1}, run=run)


def test_a_changed_trainable_is_not_unpickled(tmp_path: Path) -> None:
    run = TuneFolder(tmp_path / "run")
    tune_run(Line, config={"rate": 1.0}, stop={"training_iteration": 1}, run=run.path)
    run.trainable.write_bytes(run.trainable.read_bytes()[:-1] + b"x")
    with refused(HpcDetError, "trainable.pkl"):
        run.read_trainable()


def test_trials_as_jobs(tmp_path: Path) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    analysis = tune_run(
        Fragile,
        config={"rate": grid_search([1.0, 2.0])},
        stop=THREE,
        metric="loss",
        executor=executor,
        max_concurrent=2,
        run=tmp_path / "run",
    )
    assert [trial.last_result["loss"] for trial in analysis.trials] == [7.0, 4.0]
    for trial in analysis.trials:
        assert trial.folder.rank_log(1, 0).read_text() == "dying\n"
        assert trial.error
        assert trial.error.endswith(str(trial.folder.rank_log(1, 0)))


class Refusing(submitit.LocalExecutor):
    """An executor that accepts one job at a time, as a scheduler at its limit, even if the first job ends quickly."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.submitted: list[submitit.Job[Any]] = []
        self.refused = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        if self.submitted and not (self.refused and self.submitted[-1].done()):
            self.refused += 1
            raise submitit.core.utils.FailedJobError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
        self.submitted.append(super().submit(*args, **kwargs))
        return self.submitted[-1]


def test_a_job_that_is_refused_while_others_run_is_submitted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_det.sgd.tune.driver.REFUSED_S", 0.2)
    executor = Refusing(tmp_path / "jobs")
    analysis = tune_run(
        Line,
        config={"rate": grid_search([1.0, 2.0])},
        stop=THREE,
        metric="loss",
        executor=executor,
        max_concurrent=2,
        run=tmp_path / "run",
    )
    assert [trial.last_result["loss"] for trial in analysis.trials] == [7.0, 4.0]
    assert executor.refused


def test_of_a_job_with_several_tasks_the_first_one_trains(tmp_path: Path) -> None:
    executor = submitit.LocalExecutor(tmp_path / "jobs")
    executor.update_parameters(tasks_per_node=2)
    tune_run(Line, config={"rate": 1.0}, stop=THREE, executor=executor, run=tmp_path / "run")
    results = TuneFolder(tmp_path / "run").trial(1).results()
    assert [result["training_iteration"] for result in results] == [1, 2, 3]


def test_a_job_that_nobody_takes_ends_the_search(tmp_path: Path) -> None:
    class Never(submitit.LocalExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            raise submitit.core.utils.FailedJobError("sbatch: error: Invalid partition name specified")

    with refused(CommandError, "sbatch: error: Invalid partition name specified"):
        tune_run(Line, config={"rate": 1.0}, stop=THREE, executor=Never(tmp_path / "jobs"), run=tmp_path / "run")


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        tune_run(int, stop={"loss": "low"}, num_samples=0, run=tmp_path / "run")  # type: ignore[arg-type, dict-item]
    assert len(caught.value.problems) == 3
    with refused(UsageError, "checkpoint_freq", "'often'", ">= 0"):
        tune_run(Line, stop=THREE, checkpoint_freq="often", run=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        tune_run(Line, searcher=asha(), run=tmp_path / "run")
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["metric", "stop"]
    with refused(UsageError, "searcher.num_rungs"):
        tune_run(Line, searcher=asha(num_rungs=0), stop=THREE, metric="loss", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_metric_that_nobody_returns_is_named(tmp_path: Path) -> None:
    with refused(UsageError, "metric", "'lost'", "trial 1", "'loss'"):
        tune_run(Line, config={"rate": 1.0}, stop=THREE, metric="lost", run=tmp_path / "run")


def test_ctrl_c_ends_the_trials_and_the_search_can_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = f"""
from hpc_det.sgd.tune import tune_run
from tests.sgd.tune.trainables import Slow
tune_run(Slow, config={{"rate": 1.0}}, stop={{"training_iteration": 3}}, run={str(run)!r})
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    wait_for(lambda: (TuneFolder(run).trial(1).path / "began-2").exists(), DEADLINE_S)
    driver.send_signal(signal.SIGINT)
    _, said = driver.communicate(timeout=DEADLINE_S)
    assert b"KeyboardInterrupt" in said
    assert TuneFolder(run).trial(1).read_turn() is None
    (run / "go").touch()
    assert lengths(tune_run(Slow, config={"rate": 1.0}, stop=THREE, run=run)) == [3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a search in which trial 1 reports the losses 1, 0, 1 and trial 2 reports 4, 3, 2."""
    folder = tmp_path_factory.mktemp("search") / "run"
    config = {"net": {"lowest": grid_search([2, 5])}}
    tune_run(Valley, config=config, stop={"training_iteration": 3}, max_concurrent=2, run=folder, metric="loss")
    return folder


def test_the_best_is_that_of_the_last_results_or_of_all(run: Path) -> None:
    analysis = Analysis(run, metric="loss", mode="min")
    assert analysis.best_config == {"net": {"lowest": 2}}
    assert analysis.best_result
    assert analysis.best_result["loss"] == 1
    worst = analysis.get_best_trial(mode="max", scope="all")
    assert worst
    assert (worst.number, worst.value("loss", "max", "all")) == (2, (4, worst.results[0]))


def test_the_best_iterations_checkpoint_is_kept(run: Path) -> None:
    analysis = Analysis(run)
    best = analysis.get_best_checkpoint("loss", "min", scope="all")
    last = analysis.get_best_checkpoint("loss", "min")
    assert best
    assert last
    assert [Path(path).read_text() for path in (best, last)] == ["2", "3"]


def test_rows_have_the_config_and_the_last_result(run: Path) -> None:
    rows = Analysis(run).rows()
    assert [(row["trial"], row["config/net/lowest"], row["loss"], row["status"]) for row in rows] == [
        (1, 2, 1, "completed"),
        (2, 5, 2, "completed"),
    ]


def test_a_metric_that_nobody_told_is_named(run: Path) -> None:
    with refused(UsageError, "'los'", "'loss'"):
        Analysis(run).get_best_config("los", "min")
    with refused(UsageError, "metric"):
        Analysis(run).get_best_config()
    with refused(UsageError, "mode", "'least'"):
        Analysis(run).get_best_config("loss", "least")  # type: ignore[arg-type]
