"""`tune.run` with Ray's arguments, and the results that it returns."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hpc_det.compat import ray_tune as tune
from hpc_det.compat.ray_tune.helpers.mock import FailureInjectorCallback
from hpc_det.compat.ray_tune.schedulers import ASHAScheduler, PopulationBasedTraining
from hpc_det.errors import UsageError
from tests.facts import each_names, refused, unnamed
from tests.sgd.tune.trainables import Fragile, Line

ONE = {"training_iteration": 1}


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> tune.ExperimentAnalysis:
    """Return the results of a search over two rates, of two iterations each."""
    return tune.run(
        Line,
        name="line",
        local_dir=str(tmp_path_factory.mktemp("results")),
        config={"rate": tune.grid_search([1.0, 2.0])},
        stop={"training_iteration": 2},
        metric="loss",
        mode="min",
        checkpoint_freq=1,
        verbose=0,
    )


@pytest.mark.integration
def test_the_best_trial_of_a_search(grid: tune.ExperimentAnalysis) -> None:
    assert grid.get_best_config(metric="loss", mode="min") == grid.best_config == {"rate": 2.0}
    assert grid.get_best_config("loss", "max") == {"rate": 1.0}
    best = grid.best_trial
    assert best
    assert (best.trial_id, best.status, best.last_result["loss"]) == ("2", "TERMINATED", 6.0)
    assert best.logdir == grid.best_logdir == grid.get_best_logdir("loss", "min")
    assert grid.best_result == grid.results["2"]
    assert grid.best_result["training_iteration"] == 2
    assert grid.get_all_configs() == {trial.logdir: trial.config for trial in grid.trials}


@pytest.mark.integration
def test_checkpoints_of_a_search(grid: tune.ExperimentAnalysis) -> None:
    assert grid.best_checkpoint
    assert Path(grid.best_checkpoint).read_text() == "6.0"
    worst = grid.get_best_trial("loss", "max")
    assert worst
    assert worst.checkpoint
    assert Path(worst.checkpoint.value).read_text() == "8.0"
    found = grid.get_best_checkpoint(worst, metric="loss", mode="max")
    assert found
    assert Path(found).read_text() == "9.0"


@pytest.mark.integration
def test_results_as_tables(grid: tune.ExperimentAnalysis) -> None:
    pytest.importorskip("pandas")
    assert grid.dataframe()[["config/rate", "loss"]].to_numpy().tolist() == [[1.0, 8.0], [2.0, 6.0]]
    assert grid.dataframe(metric="loss", mode="max")["loss"].tolist() == [9.0, 8.0]
    assert grid.results_df.loc["2", "loss"] == 6.0
    assert grid.best_dataframe["loss"].tolist() == [8.0, 6.0]


@pytest.mark.integration
def test_a_search_without_a_mode_does_not_guess_one(grid: tune.ExperimentAnalysis) -> None:
    anonymous = tune.ExperimentAnalysis(grid.path)
    with refused(UsageError, "metric"):
        anonymous.get_best_config()
    with refused(UsageError, "mode", "'min'", "'max'"):
        anonymous.get_best_config(metric="loss")
    with refused(UsageError, "scope", "'avg'", "'all'"):
        anonymous.get_best_trial("loss", "min", scope="avg")  # type: ignore[arg-type]


@pytest.mark.integration
def test_a_table_of_the_trials(grid: tune.ExperimentAnalysis, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = tune.CLIReporter(max_progress_rows=1, print_intermediate_tables=True)
    reporter.add_metric_column("loss", "the loss")
    reporter.show(grid)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["trial", "status", "rate", "iter", "the", "loss"],
        ["1", "TERMINATED", "1", "2", "8"],
        ["...", "1", "more", "trials"],
    ]
    other = tune.CLIReporter(metric_columns={"loss": "x"}, parameter_columns=[])
    other.show(grid)
    assert capsys.readouterr().out.splitlines()[0].split() == ["trial", "status", "x"]


@pytest.mark.integration
def test_a_search_with_the_same_name_begins_anew_or_is_resumed(grid: tune.ExperimentAnalysis) -> None:
    arguments: dict[str, Any] = {
        "name": "line",
        "local_dir": str(grid.path.parent),
        "config": {"rate": tune.grid_search([1.0, 2.0])},
        "stop": {"training_iteration": 2},
        "metric": "loss",
        "mode": "min",
        "verbose": 0,
    }
    resumed = tune.run(Line, resume=True, **arguments)
    assert resumed.path == grid.path
    assert [trial.results for trial in resumed.trials] == [trial.results for trial in grid.trials]
    with refused(UsageError, "resume", grid.path.parent / "other-*"):
        tune.run(Line, resume="LOCAL", **{**arguments, "name": "other"})
    with refused(UsageError, "resume", "'PROMPT'", "'AUTO'"):
        tune.run(Line, resume="PROMPT", **arguments)


@pytest.mark.integration
def test_a_failed_trial_raises_an_error_unless_it_may_fail(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"config": {"rate": -1.0}, "stop": ONE, "local_dir": str(tmp_path), "verbose": 0}
    with refused(tune.TuneError, "trial 1", "the loss grows", tmp_path):
        tune.run(Fragile, **arguments)
    (trial,) = tune.run(Fragile, raise_on_failed_trial=False, max_failures=-1, **arguments).trials
    assert trial.status == "ERROR"


@pytest.mark.integration
def test_a_population_searches_with_functions(tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="loss",
        mode="min",
        perturbation_interval=1,
        quantile_fraction=0.5,
        resample_probability=1,
        hyperparam_mutations={"rate": lambda: 100.0},
    )
    config = {"rate": tune.grid_search([1.0, 2.0]), "depth": 3}
    stop = {"training_iteration": 3}
    found = tune.run(Line, config=config, stop=stop, scheduler=scheduler, local_dir=str(tmp_path), verbose=0)
    assert {trial.config["rate"] for trial in found.trials} & {100.0}
    assert [trial.config["depth"] for trial in found.trials] == [3, 3]


@pytest.mark.integration
def test_halving_ends_trials_at_the_shorter_of_both_lengths(tmp_path: Path) -> None:
    scheduler = ASHAScheduler(metric="loss", mode="min", max_t=2, reduction_factor=2)
    found = tune.run(
        Line,
        config={"rate": tune.sample_from(lambda: 1.0)},
        stop={"training_iteration": 9},
        scheduler=scheduler,
        local_dir=str(tmp_path),
        verbose=0,
    )
    assert [trial.last_result["training_iteration"] for trial in found.trials] == [2]


def test_what_would_change_results_is_refused_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        tune.run(
            Line,
            time_budget_s=60,  # type: ignore[arg-type]
            search_alg="hyperopt",  # type: ignore[arg-type]
            stop=lambda trial, result: True,  # type: ignore[arg-type]
            resources_per_trial={"cpu": 1, "gpu": 0.5},  # type: ignore[dict-item]
            restore="/checkpoint",
            num_sample=3,
        )
    each_names(
        caught.value.problems, ["time_budget_s"], ["search_alg"], ["restore"], ["'num_sample'"], ["stop"], ["0.5"]
    )


def test_metric_and_mode_belong_to_one_of_both() -> None:
    with refused(ValueError, "metric", "'loss'", "'accuracy'"):
        tune.run(Line, metric="loss", scheduler=ASHAScheduler(metric="accuracy"))


@pytest.mark.parametrize("arguments", [{"metric": "loss"}, {"scheduler": ASHAScheduler(metric="loss")}])
def test_a_metric_without_a_mode_is_refused(arguments: dict[str, Any]) -> None:
    with refused(ValueError, "mode", "'loss'", "'min'", "'max'"):
        tune.run(Line, config={"rate": 1.0}, stop=ONE, **arguments)


def test_functions_are_no_trainables() -> None:
    with refused(UsageError, "trainable", "as_trainable"):
        tune.run(len, config={}, stop=ONE)


def test_arguments_without_effect_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), refused(UsageError, "trainable"):
        tune.run(
            len, queue_trials=True, keep_checkpoints_num=1, reuse_actors=False, callbacks=[FailureInjectorCallback()]
        )
    (record,) = caplog.records
    assert not unnamed(record.getMessage(), "tune.run", "queue_trials", "keep_checkpoints_num", "callbacks")
    assert unnamed(record.getMessage(), "reuse_actors")
