from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.sgd.tune import Analysis, grid_search, tune_run
from tests.sgd.tune.trainables import Valley


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trial 1 tells 1, 0, 1 and trial 2 tells 4, 3, 2."""
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
    with pytest.raises(UsageError, match="metric 'los': no trial has told it; did you mean 'loss'"):
        Analysis(run).get_best_config("los", "min")
    with pytest.raises(UsageError, match="metric: give the name"):
        Analysis(run).get_best_config()
    with pytest.raises(UsageError, match="mode: got 'least'"):
        Analysis(run).get_best_config("loss", "least")  # type: ignore[arg-type]
