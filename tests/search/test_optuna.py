"""Optuna's choices, shared by workers: several processes ask one study, and the journal decides."""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.search.optuna_study import FILE, STUDY
from hpc_det.store.folders import ExperimentFolder
from tests.facts import refused
from tests.search.experiments import experiment
from tests.wait import DEADLINE_S

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    optuna = pytest.importorskip("optuna")

FORK = multiprocessing.get_context("fork")
SPACE = {
    "lr": {"type": "log", "base": 10.0, "minval": -4.0, "maxval": -1.0},
    "net": {
        "depth": {"type": "int", "minval": 1, "maxval": 4},
        "shape": {"type": "categorical", "vals": [[64, 64], [128]]},
        "act": {"type": "categorical", "vals": ["relu", "tanh"]},
        "bias": True,
    },
    "momentum": {"type": "double", "minval": 0.0, "maxval": 0.9},
    "flag": {"type": "categorical", "vals": [1, True]},
}


SMALL: dict[str, Any] = {"lr": SPACE["lr"], "net": {"depth": {"type": "int", "minval": 1, "maxval": 4}}}


def optuna_experiment(folder: Path, space: dict[str, Any] = SPACE, **searcher: Any) -> ExperimentFolder:
    settings = {"name": "optuna", "max_trials": 6, "sampler": "TPESampler", "sampler_settings": {}}
    found = experiment(folder, **{**settings, **searcher})
    write_json(found.effective, {**(read_json(found.effective) or {}), "hyperparameters": space})
    return found


def loss(hparams: dict[str, Any]) -> float:
    return float(hparams["lr"] * 10 + hparams["net"]["depth"])


def train_all(folder: ExperimentFolder, worker: int = 0) -> None:
    search = SearchJournal(folder)
    work = search.ask(worker, f"job {worker}")
    while work is not None:
        search.choose(work.trial)
        work = search.report(worker, work, loss(search.sample(work.trial).hparams))
    search.leave(worker)


def study_of(folder: ExperimentFolder) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return optuna.load_study(study_name=STUDY, storage=JournalStorage(JournalFileBackend(str(folder.search / FILE))))


def hparams_of(folder: ExperimentFolder) -> dict[int, dict[str, Any]]:
    search = SearchJournal(folder)
    return {trial: search.sample(trial).hparams for trial in search.state().samples}


def test_one_worker_alone_chooses_the_same_each_time(tmp_path: Path) -> None:
    first, again = optuna_experiment(tmp_path / "first"), optuna_experiment(tmp_path / "again")
    train_all(first)
    train_all(again)
    chosen = hparams_of(first)
    assert list(chosen) == list(range(1, 7))
    assert chosen == hparams_of(again)
    assert len({hparams["lr"] for hparams in chosen.values()}) == 6


def test_values_lie_in_their_ranges_and_have_the_types_of_the_file(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path)
    train_all(folder)
    for hparams in hparams_of(folder).values():
        assert 1e-4 <= hparams["lr"] <= 1e-1
        assert 0 <= hparams["momentum"] <= 0.9
        assert hparams["net"]["depth"] in (1, 2, 3, 4)
        assert hparams["net"]["shape"] in ([64, 64], [128])
        assert hparams["net"]["act"] in ("relu", "tanh")
        assert hparams["net"]["bias"] is True
        assert hparams["flag"] == 1


def test_the_seeds_are_those_of_a_random_search(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path / "optuna", {"lr": SPACE["lr"], "net": {"depth": 1}})
    drawn = SearchJournal(experiment(tmp_path / "random", name="random", max_trials=6))
    train_all(folder)
    assert [SearchJournal(folder).sample(n).seed for n in (1, 2)] == [drawn.sample(n).seed for n in (1, 2)]


def test_the_study_is_told_what_came_of_the_trials(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path, max_trials=4)
    search = SearchJournal(folder)
    workers = [search.ask(worker, f"job {worker}") for worker in range(3)]
    for work in filter(None, workers):
        search.choose(work.trial)
    assert workers[0]
    search.report(0, workers[0], 0.25)
    search.end(1, 2, Exit.FAILED)
    search.choose(4)
    states = [(trial.state.name, trial.value) for trial in study_of(folder).trials]
    assert states == [("COMPLETE", 0.25), ("FAIL", None), ("RUNNING", None), ("RUNNING", None)]


def test_a_value_that_is_none_is_a_failure_to_optuna(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path)
    search = SearchJournal(folder)
    work = search.ask(0, "job")
    assert work
    search.choose(1)
    search.report(0, work, float("nan"))
    search.choose(2)
    assert [trial.state.name for trial in study_of(folder).trials] == ["FAIL", "RUNNING"]


def test_greater_is_better_maximizes(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path, smaller_is_better=False)
    train_all(folder)
    assert study_of(folder).direction.name == "MAXIMIZE"


@pytest.mark.integration
def test_several_processes_share_one_study_and_no_trial_is_asked_for_twice(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path, max_trials=12)
    workers = [FORK.Process(target=train_all, args=(folder, worker)) for worker in range(3)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(timeout=DEADLINE_S)
        assert process.exitcode == 0
    state = SearchJournal(folder).state()
    assert state.finished
    assert sorted(state.samples) == list(range(1, 13))
    trials = study_of(folder).trials
    assert sorted(trial.user_attrs["hpc_det_trial"] for trial in trials) == list(range(1, 13))
    for number, sample in state.samples.items():
        assert trials[sample["study_trial"]].params["lr"] == sample["hparams"]["lr"]
        assert trials[sample["study_trial"]].user_attrs["hpc_det_trial"] == number


def killed_while_choosing(folder: ExperimentFolder, at: str) -> None:
    def die(*arguments: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if at == "the second value":
        optuna.Trial.suggest_float = die
    else:
        SearchJournal._write = die  # type: ignore[method-assign]
    SearchJournal(folder).choose(1)


@pytest.mark.integration
@pytest.mark.parametrize("at", ["the second value", "the entry of the journal"])
def test_who_is_killed_while_choosing_leaves_its_trial_to_the_next(tmp_path: Path, at: str) -> None:
    space = {"depth": SMALL["net"]["depth"], "lr": SPACE["lr"]}
    folder = optuna_experiment(tmp_path, space)
    search = SearchJournal(folder)
    search.ask(0, "job 0")
    process = FORK.Process(target=killed_while_choosing, args=(folder, at))
    process.start()
    process.join(timeout=DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    (asked,) = study_of(folder).trials
    assert "depth" in asked.params
    assert search.state().samples == {}
    search.choose(1)
    (taken_up,) = study_of(folder).trials
    assert taken_up.params["depth"] == asked.params["depth"]
    assert search.state().samples == {1: {"hparams": taken_up.params, "study_trial": 0}}


def test_of_two_workers_that_ask_for_the_same_trial_the_first_to_write_counts(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path)
    search = SearchJournal(folder)
    search.ask(0, "job 0")
    search.choose(1)
    study = study_of(folder)
    study._storage.create_new_trial(
        study._study_id,
        optuna.trial.create_trial(state=optuna.trial.TrialState.RUNNING, user_attrs={"hpc_det_trial": 1}),
    )
    search.choose(2)
    assert [trial.state.name for trial in study_of(folder).trials] == ["RUNNING", "FAIL", "RUNNING"]


def test_a_look_at_a_trial_asks_nobody(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path)
    search = SearchJournal(folder)
    search.ask(0, "job")
    assert search.sample(1).hparams == {}
    assert not (folder.search / FILE).exists()


@pytest.mark.parametrize("sampler", ["RandomSampler", "QMCSampler", "NSGAIISampler"])
def test_other_samplers_go_by_their_names(tmp_path: Path, sampler: str) -> None:
    folder = optuna_experiment(tmp_path, SMALL, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        train_all(folder)
    assert len({hparams["lr"] for hparams in hparams_of(folder).values()}) == 6


def test_a_grid_of_optunas_goes_over_all_its_points(tmp_path: Path) -> None:
    space = {**SMALL, "lr": 0.1}
    settings = {"search_space": {"net.depth": [1, 2, 4]}}
    folder = optuna_experiment(tmp_path, space, sampler="GridSampler", sampler_settings=settings, max_trials=3)
    train_all(folder)
    assert sorted(hparams["net"]["depth"] for hparams in hparams_of(folder).values()) == [1, 2, 4]


def test_a_sampler_may_be_a_class_of_the_trials_code(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path, SMALL, sampler="mine:Mine")
    folder.code.mkdir()
    (folder.code / "mine.py").write_text("from optuna.samplers import RandomSampler\nclass Mine(RandomSampler): ...\n")
    train_all(folder)
    assert len(hparams_of(folder)) == 6


@pytest.mark.parametrize(
    ("searcher", "facts"),
    [
        ({"sampler": "TPESampeler"}, ["searcher.sampler", "optuna.samplers", "'TPESampeler'", "'TPESampler'"]),
        ({"sampler_settings": {"gama": 1}}, ["searcher.sampler_settings", "TPESampler", "TypeError", "'gama'"]),
        ({"sampler": "mine:Mine"}, ["mine:Mine", "mine.py"]),
    ],
)
def test_a_sampler_that_there_is_not_is_named(tmp_path: Path, searcher: dict[str, Any], facts: list[str]) -> None:
    search = SearchJournal(optuna_experiment(tmp_path, **searcher))
    with refused(UsageError, *facts):
        search.choose(1)


def test_a_study_that_was_torn_is_named_and_may_be_deleted(tmp_path: Path) -> None:
    folder = optuna_experiment(tmp_path)
    search = SearchJournal(folder)
    search.ask(0, "job")
    search.choose(1)
    file = folder.search / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:-1], lines[-1][:20], *lines]))
    with refused(UsageError, "optuna.log"):
        SearchJournal(folder).choose(2)
    file.unlink()
    follower = SearchJournal(folder)
    follower.choose(2)
    assert sorted(follower.state().samples) == [1, 2]
