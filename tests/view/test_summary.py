"""The summary of an experiment, which listings, descriptions, hooks and reports share."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from hpc_det.node.json_files import write_json
from hpc_det.requeue import Action, Cause
from hpc_det.store.attempt import HOOK
from hpc_det.view.formatting import reached
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.summary import best, phase, summary, why
from tests.cli.life import Life, halving
from tests.facts import unnamed


def test_a_paused_experiment_says_by_whom_also_while_its_trials_save(life: Life) -> None:
    life.begins()
    assert why(ExperimentView(life.folder), ExperimentState.RUNNING) is None
    life.search.pause("ada")
    view = ExperimentView(life.folder)
    assert not unnamed(str(why(view, ExperimentState.RUNNING)), "ada", "paused")
    assert not unnamed(str(why(view, ExperimentState.PAUSED)), "ada")


def test_a_canceled_experiment_says_by_whom_also_while_its_trials_save(life: Life) -> None:
    life.begins()
    life.search.pause("ada")
    life.search.cancel("bob")
    view = ExperimentView(life.folder)
    assert not unnamed(str(why(view, ExperimentState.RUNNING)), "bob", "canceled")
    assert not unnamed(str(why(view, ExperimentState.CANCELED)), "bob")


def test_a_failed_experiment_says_what_failed_and_a_completed_one_nothing(life: Life) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    view = ExperimentView(life.folder)
    assert not unnamed(str(why(view, ExperimentState.ERROR)), "rank 1 on node1: ValueError: x", "too often")
    assert why(view, ExperimentState.COMPLETED) is None


def test_a_compilation_of_deepspeed_shows_until_it_has_ended(life: Life) -> None:
    life.begins()
    times = life.folder.trial().compilation(1)
    times.parent.mkdir(exist_ok=True)
    view = ExperimentView(life.folder)
    assert summary(view, ExperimentState.RUNNING).phase is None
    write_json(times, {"began": time.time(), "ended": None})
    shown = summary(view, ExperimentState.RUNNING)
    assert shown.phase == phase(view, ExperimentState.RUNNING) == "compiling DeepSpeed ops"
    assert reached(asdict(shown)) == "compiling DeepSpeed ops"
    assert not unnamed(str(why(view, ExperimentState.RUNNING)), "DeepSpeed")
    assert phase(view, ExperimentState.QUEUED) is None
    write_json(times, {"began": time.time(), "ended": time.time()})
    assert (phase(view, ExperimentState.RUNNING), why(view, ExperimentState.RUNNING)) == (None, None)


def test_the_compilation_of_an_attempt_that_has_ended_does_not_show(life: Life) -> None:
    life.begins()
    life.folder.trial().compilation(1).parent.mkdir(exist_ok=True)
    write_json(life.folder.trial().compilation(1), {"began": time.time(), "ended": None})
    life.ends(Cause.FAILED, Action.RESTART)
    life.begins()
    assert phase(ExperimentView(life.folder), ExperimentState.RUNNING) is None


def test_a_running_startup_hook_shows_until_it_has_ended_on_all_nodes(life: Life) -> None:
    life.begins()
    times = life.trial.startup_hook(1)
    times.parent.mkdir(exist_ok=True)
    view = ExperimentView(life.folder)
    assert (phase(view, ExperimentState.RUNNING), summary(view, ExperimentState.RUNNING).phase) == (None, None)
    write_json(times, {"began": time.time(), "ended": None})
    assert phase(view, ExperimentState.RUNNING) == summary(view, ExperimentState.RUNNING).phase == "startup hook"
    assert not unnamed(str(why(view, ExperimentState.RUNNING)), HOOK)
    assert phase(view, ExperimentState.QUEUED) is None
    write_json(times, {"began": time.time(), "ended": time.time()})
    assert (phase(view, ExperimentState.RUNNING), why(view, ExperimentState.RUNNING)) == (None, None)


def test_the_hook_of_one_trial_is_not_the_state_of_a_search(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    life.trial.startup_hook(1).parent.mkdir(exist_ok=True)
    write_json(life.trial.startup_hook(1), {"began": time.time(), "ended": None})
    view = ExperimentView(life.folder)
    assert (phase(view, ExperimentState.RUNNING), why(view, ExperimentState.RUNNING)) == (None, None)


def test_the_hook_of_an_attempt_that_has_ended_does_not_show(life: Life) -> None:
    life.begins()
    life.trial.startup_hook(1).parent.mkdir(exist_ok=True)
    write_json(life.trial.startup_hook(1), {"began": time.time(), "ended": None})
    life.ends(Cause.FAILED, Action.RESTART)
    life.begins()
    assert phase(ExperimentView(life.folder), ExperimentState.RUNNING) is None


def test_the_best_of_the_only_trial_is_by_its_validations(life: Life) -> None:
    life.begins()
    assert best(ExperimentView(life.folder)) is None
    for steps, accuracy in ((100, 0.9), (200, 0.8)):
        life.reports("validation", steps, {"accuracy": accuracy})
    assert best(ExperimentView(life.folder)) == {"metric": "accuracy", "value": 0.9, "batches": 100, "trial": 1}


def test_the_best_of_a_search_is_by_what_its_trials_told_it(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    life.reports("validation", 50, {"accuracy": 0.99})
    life.reaches(0.5)
    life.reaches(0.7)
    assert best(ExperimentView(life.folder)) == {"metric": "accuracy", "value": 0.7, "batches": 100, "trial": 2}
