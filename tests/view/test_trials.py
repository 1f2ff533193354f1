"""The states of trials and their counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.node.json_files import write_json
from hpc_det.requeue import Action, Cause
from hpc_det.view.attempt_sentences import attempt_in_words
from hpc_det.view.state import ExperimentView
from hpc_det.view.trials import attempts_of, counted, differing, state_now
from tests.cli.life import Life, halving, random_search


def states(life: Life, *, is_over: bool = False) -> str:
    """Return the state of each trial, by number, separated by spaces."""
    search = ExperimentView(life.folder).search
    found = [state_now(search, life.folder.trial(number), is_over=is_over) for number in sorted(search.trials)]
    return " ".join(state.value for state in found)


def test_a_trial_runs_and_completes(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    assert states(life) == ""
    life.begins(0)
    assert states(life) == "RUNNING"
    life.begins(1)
    life.finishes(0)
    assert states(life) == "COMPLETED RUNNING"


def test_a_trial_that_somebody_has_and_that_did_not_begin_yet_runs(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.search.ask(0, "4711")
    assert states(life) == "RUNNING"


def test_a_preempted_trial_is_queued_until_its_job_is_back(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE)
    assert states(life) == "QUEUED"
    life.begins()
    assert states(life) == "RUNNING"


def test_a_restart_after_a_failure_is_running(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.ends(Cause.FAILED, Action.RESTART)
    assert states(life) == "RUNNING"


@pytest.mark.parametrize("writes_outcome", [True, False])
def test_a_job_that_is_killed_after_the_last_report_leaves_a_finished_attempt(
    tmp_path: Path, writes_outcome: bool
) -> None:
    """The kill comes after the report to the search, before the line in the journal."""
    life = Life.submitted(tmp_path)
    life.begins()
    life.saves(100)
    search = life.search
    search.report(0, search.state().open[0], 0.9)
    if writes_outcome:
        write_json(life.trial.outcome, {"attempt": 1, "kind": "finished", "steps": 100})
    (alive,) = attempts_of(search.state(), life.trial, is_over=False)
    assert alive.is_open, "its job may still write"
    (killed,) = attempts_of(search.state(), life.trial, is_over=True)
    assert (killed.cause, killed.action, killed.batches) == ("finished", "done", 100)
    assert killed.ended
    assert killed.ended >= killed.started
    assert "finished at batch 100" in attempt_in_words(killed, killed.ended, is_over=True)


def test_a_job_that_is_killed_after_a_stretch_leaves_an_attempt_that_waits(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(4))
    life.begins()
    life.saves(25)
    search = life.search
    search.report(0, search.state().open[0], 0.9)
    write_json(life.trial.outcome, {"attempt": 1, "kind": "waiting", "steps": 25})
    (killed,) = attempts_of(search.state(), life.trial, is_over=True)
    assert (killed.cause, killed.action, killed.batches) == ("waiting", "wait", 25)


def test_an_attempt_of_a_trial_that_has_not_finished_stays_open(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.saves(100)
    assert attempts_of(life.search.state(), life.trial, is_over=True)[0].is_open


@pytest.mark.parametrize(
    ("cause", "action", "expected"),
    [(Cause.FAILED, Action.GIVE_UP, "ERROR"), (Cause.CANCELLED, Action.DONE, "CANCELED")],
)
def test_a_trial_that_fails_or_is_cancelled(tmp_path: Path, cause: Cause, action: Action, expected: str) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.ends(cause, action)
    assert states(life) == expected


def test_a_trial_pauses_until_the_searcher_wants_more_of_it(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(5))
    life.begins()
    life.reaches(0.9)
    assert states(life) == "PAUSED RUNNING"
    life.reaches(0.8)
    life.reaches(0.7)
    life.reaches(0.6)
    assert states(life) == "RUNNING PAUSED PAUSED PAUSED"
    life.reaches(0.95)
    life.reaches(0.1)
    assert states(life) == "COMPLETED COMPLETED COMPLETED COMPLETED COMPLETED"


def test_a_trial_that_still_saves_is_running_although_the_search_has_let_it_go(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **halving(5))
    life.begins()
    search = life.search
    search.report(0, search.state().open[0], 0.9)
    assert states(life).split()[0] == "RUNNING"


def test_the_trial_of_a_lost_worker_waits_for_another_one(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    life.begins(0)
    life.search.lose(0, "4711_0")
    assert states(life) == "QUEUED"


def test_what_was_open_when_all_jobs_ended_was_not_done(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, **halving(5))
    life.begins()
    life.reaches(0.9)
    assert states(life, is_over=True) == "CANCELED ERROR"
    life.search.cancel("ada")
    assert states(life, is_over=True) == "CANCELED CANCELED"


def test_a_trial_that_its_owner_continues_is_no_error_any_more(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP)
    life.search.continue_([1])
    life.journal.continued()
    assert states(life) == "QUEUED"
    life.begins()
    assert states(life) == "RUNNING"


def test_trials_are_counted_by_what_the_search_knows(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=3, **random_search(4))
    for worker in range(3):
        life.begins(worker)
    life.finishes(0)
    life.ends(Cause.FAILED, Action.GIVE_UP, worker=1)
    found = counted(ExperimentView(life.folder).search, is_running=True)
    assert (found.expected, found.created, found.completed, found.failed, found.invalid) == (4, 4, 1, 1, 0)
    assert found.running == 2


def test_hyperparameters_that_differ_are_named_with_their_place() -> None:
    assert differing([{"lr": 1, "net": {"width": 8, "depth": 2}}, {"lr": 1, "net": {"width": 9, "depth": 2}}]) == [
        "net.width"
    ]
    assert differing([{"lr": 1}]) == []
