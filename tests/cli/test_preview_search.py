from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_det.cli.preview_search import in_words, previewed
from tests.cli.conftest import Command
from tests.facts import unnamed

LR = {"lr": {"type": "log", "base": 10, "minval": -4, "maxval": -2, "count": 2}}
HALVING = {
    "name": "async_halving",
    "smaller_is_better": True,
    "max_length": {"batches": 900},
    "max_trials": 9,
    "num_rungs": 3,
    "divisor": 3,
    "stop_once": False,
    "max_concurrent_trials": 1,
}


# --- the command


@pytest.fixture
def here(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code)


@pytest.mark.usefixtures("here")
def test_a_single_trial_in_words(hpc_det: Command, config: Path, root: Path) -> None:
    result = hpc_det(
        "preview-search",
        config,
        "--template",
        "small",
        *("--config", "hyperparameters.lr=0.1"),
        *("--config", "reproducibility.experiment_seed=7"),
    )
    assert result == (
        0,
        "single: 1 trial, at most 1 at a time\n"
        "  1 trial to 10 batches\n"
        "In all 10 batches, 1 times a full trial.\n"
        "\n"
        "Hyperparameters with reproducibility.experiment_seed 7:\n"
        "  trial 1: {lr: 0.1}\n",
        "",
    )
    assert not root.exists()


@pytest.mark.usefixtures("here")
def test_the_notes_on_ranges_are_on_stderr(hpc_det: Command, config: Path) -> None:
    lr = "hyperparameters.lr={type: log, minval: 0.001, maxval: 0.1}"
    result = hpc_det("preview-search", config, "--config", lr, "--json")
    assert json.loads(result.out)
    assert not unnamed(result.err, "note", "hyperparameters.lr", "1.002")


@pytest.mark.usefixtures("here")
def test_a_single_trial_as_json(hpc_det: Command, config: Path) -> None:
    record = json.loads(hpc_det("preview-search", config, "--json").out)
    seed = record["first"][0].pop("seed")
    assert 0 <= seed < 2**31
    assert record == {
        "searcher": "single",
        "trials": 1,
        "concurrent": 1,
        "unit": "batches",
        "lengths": [{"length": 10, "trials": 1}],
        "total": 10,
        "full_trials": 1,
        "experiment_seed": None,
        "first": [{"trial": 1, "hparams": {}}],
    }


@pytest.mark.usefixtures("here")
def test_what_create_refuses_has_no_preview(hpc_det: Command, config: Path) -> None:
    result = hpc_det("preview-search", config, "--config", "searcher.metric=", "--cluster", "slurm")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("hpc-det: searcher.metric: ")


# --- every search


def test_a_search_by_halving_tells_how_many_train_how_long() -> None:
    record = previewed(HALVING, LR, 777)
    trials = {row["length"]: row["trials"] for row in record["lengths"]}
    assert list(trials) == [100, 300, 900]
    assert sum(trials.values()) == record["trials"] == 9
    assert record["total"] == sum(length * count for length, count in trials.items())
    assert record["full_trials"] == round(record["total"] / 900, 2)
    lines = in_words(record).splitlines()
    assert lines[0] == "async_halving: 9 trials, at most 1 at a time"
    assert lines[1] == f"  {trials[100]} trials to 100 batches"
    assert lines[-1] == "  ..."


def test_a_preview_shows_the_trials_that_there_will_be() -> None:
    grid = previewed({"name": "grid", "max_length": {"epochs": 2}, "max_concurrent_trials": 16}, LR, None)
    assert in_words(grid).splitlines() == [
        "grid: 2 trials, at most 2 at a time",
        "  2 trials to 2 epochs",
        "In all 4 epochs, 2 times a full trial.",
        "",
        "Hyperparameters with reproducibility.experiment_seed 0; if unset, the time of submission is the seed:",
        "  trial 1: {lr: 0.0001}",
        "  trial 2: {lr: 0.01}",
    ]


@pytest.mark.parametrize("limit", [0, 16])
def test_a_search_without_a_length_says_so(limit: int) -> None:
    searcher: dict[str, Any] = {"name": "random", "max_trials": 4, "max_concurrent_trials": limit, "max_length": None}
    record = previewed(searcher, {}, 1)
    assert (record["unit"], record["total"], record["full_trials"]) == (None, None, None)
    assert record["lengths"] == [{"length": None, "trials": 4}]
    assert in_words(record).splitlines()[:3] == [
        "random: 4 trials, at most 4 at a time",
        "  4 trials to their own end",
        "",
    ]
