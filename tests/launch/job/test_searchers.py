"""Searches in which Optuna or a user's class decides, with workers as real processes."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.search.method import Exit
from hpc_det.store.journal import Journal
from tests.facts import unnamed
from tests.launch.gang import EFFECTIVE, Gang
from tests.search.methods import POPULATION, ROUNDS
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.integration

REPORTS = """
import os
from hpc_det.store.attempt import Attempt
from hpc_det.search.journal import SearchJournal
from hpc_det.node.json_files import write_json

attempt = Attempt.from_env(os.environ)
search = SearchJournal(attempt.trial.experiment())
work = search.state().open[attempt.worker]
search.report(attempt.worker, work, search.sample(work.trial).hparams["lr"])
kind = "finished" if search.state().method.is_closed(work.trial) else "waiting"
write_json(attempt.trial.outcome, {"attempt": attempt.number, "kind": kind, "steps": work.until})
"""
"""A trial without torch that reports its learning rate as its loss."""
LR = {"type": "log", "base": 10.0, "minval": -4.0, "maxval": -1.0}
OPTUNA = {"name": "optuna", "max_trials": 4, "sampler": "TPESampler", "sampler_settings": {"n_startup_trials": 2}}
CUSTOM = {"name": "custom", "class": "mine:Rounds", "max_trials": 4, "settings": {"rounds": 2}}

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="needs the extra `optuna`")


def prepare(gang: Gang, **searcher: Any) -> None:
    (gang.code / "report.py").write_text(REPORTS)
    gang.plan("$PYTHON report.py")
    settings = {**EFFECTIVE["searcher"], **searcher}
    write_json(gang.experiment.effective, {**EFFECTIVE, "searcher": settings, "hyperparameters": {"lr": LR}})


def trained(gang: Gang) -> dict[int, tuple[int | None, float | None]]:
    return {number: (trial.length, trial.value) for number, trial in gang.search().trials.items()}


@needs_optuna
def test_optuna_chooses_what_two_workers_train(gang: Gang) -> None:
    prepare(gang, **OPTUNA)
    assert gang.start_job(2).wait(timeout=DEADLINE_S) == 0
    specs = {number: read_json(gang.experiment.trial(number).trial) for number in range(1, 5)}
    values = {number: spec["hparams"]["lr"] for number, spec in specs.items() if spec}
    assert trained(gang) == {number: (100, value) for number, value in values.items()}
    assert len(set(values.values())) == 4


@needs_optuna
def test_a_sampler_that_there_is_not_fails_its_trials_once_and_names_the_nearest(gang: Gang) -> None:
    prepare(gang, **{**OPTUNA, "max_trials": 2, "sampler": "TPESampeler"})
    code, log = gang.run_job()
    assert code == 1
    assert unnamed(log, "optuna.samplers", "'TPESampeler'", "'TPESampler'") == []
    assert "Traceback" not in log
    assert {trial.ended for trial in gang.search().trials.values()} == {Exit.FAILED}
    for number in (1, 2):
        events = Journal(gang.experiment.trial(number).journal).events()
        (ended,) = (event for event in events if event["event"] == "ended")
        assert (ended["cause"], ended["action"], ended["user_error"]) == ("failed", "give up", True)


def test_a_method_of_the_users_trains_the_better_half_on(gang: Gang) -> None:
    (gang.code / "mine.py").write_text(ROUNDS)
    prepare(gang, **CUSTOM)
    assert gang.start_job(2).wait(timeout=DEADLINE_S) == 0
    by_value = sorted(trained(gang).values(), key=lambda length_and_value: length_and_value[1] or 0)
    assert [length for length, _ in by_value] == [100, 100, 50, 50]


def test_an_error_in_a_method_of_the_users_ends_the_search_with_its_line(gang: Gang) -> None:
    (gang.code / "mine.py").write_text(ROUNDS.replace("del self.trials.working[trial]", "raise KeyError(trial)"))
    prepare(gang, **CUSTOM)
    gang.run_job()
    state = gang.search()
    assert state.finished
    assert state.given_up is not None
    assert "report: KeyError: 1" in state.given_up
    assert "mine.py, line " in state.given_up


def test_a_trial_that_begins_with_anothers_weights_is_told_where_they_are_or_fails(gang: Gang) -> None:
    (gang.code / "mine.py").write_text(POPULATION)
    prepare(gang, **{**CUSTOM, "class": "mine:Population", "settings": {"size": 2}})
    code, _ = gang.run_job()
    assert code == 1
    assert {number: trial.ended for number, trial in gang.search().trials.items()} == {
        1: None,
        2: None,
        3: Exit.FAILED,
        4: Exit.FAILED,
    }
    log = gang.experiment.trial(3).job_log.read_text()
    assert unnamed(log, "trial 3", "checkpoint") == []
    assert re.search("trial [12]", log)


def test_a_trial_that_reports_no_metric_has_failed_where_trials_are_compared(gang: Gang) -> None:
    gang.plan("true")
    halving = {"name": "async_halving", "max_trials": 2, "num_rungs": 2, "divisor": 2, "stop_once": False}
    write_json(gang.experiment.effective, {**EFFECTIVE, "searcher": {**EFFECTIVE["searcher"], **halving}})
    job = gang.start_job(1)
    assert job.wait(timeout=DEADLINE_S) == 1
    assert {trial.ended for trial in gang.search().trials.values()} == {Exit.FAILED}
    assert unnamed(gang.printed.read_text(), "trial 1", "searcher.metric") == []
