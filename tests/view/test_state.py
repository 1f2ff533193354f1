"""The state of an experiment, for every combination of the states of its search and its jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState, JobStatus
from hpc_det.search.method import Exit
from hpc_det.store.attempt import failure_now, note_failure, request_stop
from hpc_det.view.state import ExperimentState, ExperimentView
from tests.cli.life import Life, halving, random_search
from tests.facts import refused, unnamed

QUEUED, RUNNING = ExperimentState.QUEUED, ExperimentState.RUNNING
COMPLETED, ERROR, CANCELED = ExperimentState.COMPLETED, ExperimentState.ERROR, ExperimentState.CANCELED


@pytest.fixture
def life(tmp_path: Path) -> Life:
    return Life.submitted(tmp_path)


def state(life: Life, *jobs: JobState) -> ExperimentState:
    return ExperimentView(life.folder).state([JobStatus(job) for job in jobs])


def why(life: Life, found: ExperimentState = ERROR) -> str:
    return ExperimentView(life.folder).why_not_completed(found)


@pytest.mark.parametrize(
    ("cause", "action", "expected"),
    [
        (Cause.FINISHED, Action.DONE, COMPLETED),
        (Cause.CANCELLED, Action.DONE, CANCELED),
        (Cause.FAILED, Action.GIVE_UP, ERROR),
        (Cause.PREEMPTED, Action.GIVE_UP, ERROR),
    ],
)
def test_an_end_stands_whatever_the_scheduler_says(
    life: Life, cause: Cause, action: Action, expected: ExperimentState
) -> None:
    life.begins()
    life.ends(cause, action)
    assert {state(life, job) for job in JobState} == {expected}
    assert ExperimentView(life.folder).settled() is expected


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (JobState.QUEUED, QUEUED),
        (JobState.HELD, QUEUED),
        (JobState.RUNNING, RUNNING),
        (JobState.ENDED, ERROR),
        (JobState.UNKNOWN, QUEUED),
    ],
)
def test_a_preempted_experiment_is_where_the_scheduler_says(
    life: Life, job: JobState, expected: ExperimentState
) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    assert state(life, job) is expected


def test_without_news_an_open_attempt_is_running(life: Life) -> None:
    assert state(life, JobState.UNKNOWN) is QUEUED
    assert state(life) is QUEUED
    life.begins()
    assert state(life, JobState.UNKNOWN) is RUNNING
    assert state(life) is RUNNING


def test_a_worker_that_still_writes_keeps_a_finished_search_running(life: Life) -> None:
    life.begins()
    search = life.search
    search.report(0, search.state().open[0], 0.9)
    view = ExperimentView(life.folder)
    assert view.search.finished
    assert view.settled() is None
    assert state(life, JobState.RUNNING) is RUNNING
    assert state(life, JobState.UNKNOWN) is RUNNING
    assert state(life, JobState.ENDED) is COMPLETED
    search.leave(0)
    assert state(life, JobState.RUNNING) is COMPLETED


def test_a_job_that_begins_when_all_is_done_brings_nothing_back(life: Life) -> None:
    life.begins()
    life.finishes()
    life.search.ask(1, "4712")
    assert state(life, JobState.RUNNING) is COMPLETED


def test_a_job_that_ended_without_a_word_is_an_error_with_the_first_failure(life: Life) -> None:
    assert state(life, JobState.ENDED) is ERROR
    assert not unnamed(why(life), "first attempt")
    life.begins()
    note_failure(life.trial, 1, failure_now(3, "OSError: disk\nfull"))
    assert state(life, JobState.ENDED) is ERROR
    assert not unnamed(why(life), "rank 3", "OSError: disk; full")


def test_a_job_that_could_not_go_back_into_the_queue_says_why(life: Life) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    life.journal.problem(1, "scontrol: refused with exit code 1: disabled")
    assert state(life, JobState.ENDED) is ERROR
    assert not unnamed(why(life), "scontrol: refused with exit code 1: disabled")


@pytest.mark.parametrize("reason", ["kill", "cancel"])
def test_a_job_that_was_told_to_end_is_canceled(life: Life, reason: str) -> None:
    life.begins()
    request_stop(life.trial.stop, attempt=None, reason=reason, source="ada")  # type: ignore[arg-type]
    assert state(life, JobState.ENDED) is CANCELED
    assert why(life, CANCELED) == "by ada"


def test_a_signal_is_no_cancellation(life: Life) -> None:
    life.begins()
    request_stop(life.trial.stop, attempt=1, reason="signal", source="TERM on node1")
    assert state(life, JobState.ENDED) is ERROR


def test_a_cancelled_search_is_canceled_once_its_jobs_are_gone(life: Life) -> None:
    life.begins()
    life.search.cancel("ada")
    assert state(life, JobState.RUNNING) is RUNNING
    assert state(life, JobState.ENDED) is CANCELED
    assert why(life, CANCELED) == "by ada"


def test_a_trial_that_finishes_before_it_hears_of_a_pause_has_finished(life: Life) -> None:
    life.begins()
    life.search.pause("ada")
    life.finishes()
    assert ExperimentView(life.folder).settled() is COMPLETED


def test_what_is_cancelled_while_it_is_paused_is_canceled(life: Life) -> None:
    life.begins()
    life.search.pause("ada")
    life.search.lose(0, "4711")
    assert ExperimentView(life.folder).settled() is ExperimentState.PAUSED
    life.search.cancel("ada")
    assert ExperimentView(life.folder).settled() is CANCELED


def test_what_ended_a_failed_experiment_is_its_first_failure(life: Life) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="failure 1; max_restarts is 0", failure="rank 1 on node1: ValueError")
    assert not unnamed(why(life), "rank 1 on node1: ValueError", "failure 1; max_restarts is 0")


def test_torn_files_of_a_trial_are_no_error(life: Life) -> None:
    life.begins()
    for file in (life.trial.journal, life.trial.metrics):
        with file.open("a") as torn:
            torn.write('{"event": "end')
    life.trial.stop.write_text('{"attempt"')
    assert state(life, JobState.ENDED) is ERROR


def test_a_damaged_record_of_a_job_hides_no_job(life: Life) -> None:
    """The job may run: a damaged record does not prove that it does not exist."""
    life.begins()
    for damage in ("", "{}", "7", '{"job_id": 7, "scheduler": "slurm", "submitted": 1.0, "first": 0, "workers": 1}'):
        life.folder.job().write_text(damage)
        with refused(HpcDetError, life.folder.job()):
            ExperimentView(life.folder)


# --- several trials


def test_one_completed_trial_is_enough(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    for worker in (0, 1):
        life.begins(worker)
    life.ends(Cause.FAILED, Action.GIVE_UP, worker=0)
    assert state(life, JobState.RUNNING) is RUNNING
    life.finishes(worker=1)
    assert state(life, JobState.UNKNOWN) is COMPLETED


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([Exit.INVALID_HP, Exit.FAILED, Exit.FAILED], ERROR),
        ([Exit.INVALID_HP, Exit.FAILED, Exit.COMPLETED], COMPLETED),
    ],
)
def test_a_trial_whose_hyperparameters_cannot_work_completes_nothing(
    tmp_path: Path, ends: list[Exit], expected: ExperimentState
) -> None:
    life = Life.submitted(tmp_path, **random_search(2))
    life.begins()
    for how in ends:
        life.ends(Cause.FAILED, Action.GIVE_UP, how=how)
    assert state(life, JobState.ENDED) is expected


def test_failures_of_all_trials_are_counted(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    for worker in (0, 1):
        life.begins(worker)
        life.ends(Cause.FAILED, Action.GIVE_UP, worker=worker, why="too often", failure=f"rank {worker}: KeyError")
    assert state(life, JobState.ENDED) is ERROR
    assert not unnamed(why(life), "2 of 2", "trial 1", "rank 0: KeyError", "too often")


def test_jobs_that_end_before_their_trials_are_done_are_an_error(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=3, **random_search(3))
    assert not unnamed(why(life), "jobs", "trials")
    for worker in (0, 1):
        life.begins(worker)
    life.finishes(worker=0)
    assert state(life, JobState.ENDED) is ERROR
    assert not unnamed(why(life), "2 of 3", "trial 2")


def test_one_job_that_runs_makes_the_experiment_running(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    assert state(life, JobState.ENDED, JobState.QUEUED) is QUEUED
    assert state(life, JobState.QUEUED, JobState.RUNNING) is RUNNING


def test_an_experiment_is_suspended_while_all_jobs_that_have_nodes_are(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    running, suspended = JobStatus(JobState.RUNNING), JobStatus(JobState.RUNNING, is_suspended=True)
    view = ExperimentView(life.folder)
    assert view.state([suspended, JobStatus(JobState.QUEUED)]) is ExperimentState.SUSPENDED
    assert view.state([suspended, running]) is RUNNING
    assert not ExperimentState.SUSPENDED.is_final


def test_without_news_all_workers_back_in_the_queue_are_queued(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=2, **random_search(2))
    for worker in (0, 1):
        life.begins(worker)
    life.ends(Cause.PREEMPTED, Action.REQUEUE, worker=0)
    assert state(life, JobState.UNKNOWN) is RUNNING
    life.ends(Cause.PREEMPTED, Action.REQUEUE, worker=1)
    assert state(life, JobState.UNKNOWN) is QUEUED


def test_elements_of_an_array_are_asked_for_by_its_id_and_jobs_by_hand_by_theirs(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path, workers=3, **halving(4))
    life.begins(1)
    life.begins(2, job="5000")
    assert ExperimentView(life.folder).job_ids() == ["4711", "5000"]


def test_a_job_comes_before_those_that_wait_for_its_end(tmp_path: Path) -> None:
    life = Life.submitted(tmp_path)
    write_json(life.folder.next_jobs(1, 0), {"jobs": ["4711", "4712"]})
    write_json(life.folder.job(2), {**(read_json(life.folder.job(1)) or {}), "job_id": "4720"})
    write_json(life.folder.next_jobs(2, 0), {"jobs": ["4720", "4721"]})
    assert ExperimentView(life.folder).job_ids() == ["4711", "4712", "4720", "4721"]


def test_the_time_of_a_search_counts_only_while_a_worker_is_present(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("hpc_det.search.journal.time.time", lambda: now)
    life.begins()
    now = 1100.0
    life.search.leave(0)
    now = 5000.0
    life.search.ask(0, "4712")
    assert ExperimentView(life.folder).worked_s(5010.0) == pytest.approx(110.0)
