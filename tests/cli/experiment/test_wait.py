"""What goes on until an experiment has ended, and what ends it: wait, logs, kill."""

from __future__ import annotations

import getpass
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.node.json_files import read_json, write_json
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import CommandError, JobState, Run
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import read_stop
from hpc_det.view.state import ExperimentState
from hpc_det.view.watch import Watch
from tests.cli.conftest import Command, Result
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed
from tests.labs.pbs_lab import PbsLab

WAIT = ("experiment", "wait", "1", "--poll", "0.05")


def after(event: Callable[[], object], state: JobState = JobState.RUNNING) -> Callable[[], JobState]:
    """The scheduler says `state`, and this has happened."""

    def happen() -> JobState:
        event()
        return state

    return happen


# --- wait


def test_wait_returns_0_when_the_experiment_is_completed(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    scheduler.states = [JobState.QUEUED, after(life.begins), JobState.RUNNING, after(life.finishes)]
    assert hpc_det(*WAIT) == (0, "", "")


def test_on_pbs_every_job_of_an_experiment_has_news(
    pbs_lab: PbsLab, root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One with a successor that waits for the end of the first job."""
    first, successor = (pbs_lab.submit("-h", "--", "/bin/true") for _ in range(2))
    folder = Life.submitted(root, job_id=first).folder
    write_json(folder.job(), {**(read_json(folder.job()) or {}), "scheduler": "pbs"})
    write_json(folder.next_jobs(1, 0), {"jobs": [first, successor]})
    watch = Watch(folder)
    assert watch.state() is ExperimentState.QUEUED
    assert capfd.readouterr().err == ""
    assert first in (watch.view.waits_for or "")


def test_wait_names_the_first_failure(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP, why="too often", failure="rank 1 on node1: ValueError: x")
    assert hpc_det(*WAIT).fails(
        1, "experiment 1", "ERROR", "rank 1 on node1: ValueError: x", "too often", "`hpc-det experiment logs 1`"
    )


def test_wait_reports_a_job_that_ended_without_a_word(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states = [JobState.RUNNING, JobState.ENDED]
    result = hpc_det(*WAIT)
    assert result.code == 1
    assert not unnamed(result.err, "experiment 1", "ERROR")


def test_an_end_without_a_word_that_is_seen_only_once_is_none(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.begins()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=120)
    scheduler.states = [JobState.RUNNING, JobState.ENDED, JobState.QUEUED, after(life.begins), after(life.finishes)]
    assert hpc_det(*WAIT).code == 0


@pytest.mark.integration
def test_wait_lifts_each_hold_once(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    held = JobState.HELD
    scheduler.states = [held, held, JobState.RUNNING, held, after(life.begins), after(life.finishes)]
    result = hpc_det(*WAIT)
    assert result.code == 0
    assert scheduler.released == ["4711", "4711"]
    held_back = "experiment 1 is back in the queue, held by the scheduler"
    said = f"hpc-det: {held_back}: released job 4711, it may start now\n"
    assert result.err == said * 2


def test_a_hold_that_cannot_be_lifted_is_waited_for(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise CommandError("scontrol: refused")

    monkeypatch.setattr(scheduler, "release", refuse)
    scheduler.states = [JobState.HELD, after(life.begins), after(life.finishes)]
    result = hpc_det(*WAIT)
    assert result.code == 0
    assert not unnamed(result.err, "releasing job 4711 failed: scontrol: refused")


def test_without_news_from_the_scheduler_files_count(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.reason = "squeue: no answer"
    scheduler.states = [JobState.UNKNOWN, JobState.UNKNOWN, after(life.begins), after(life.finishes, JobState.UNKNOWN)]
    result = hpc_det(*WAIT)
    assert result.code == 0
    assert not unnamed(result.err, "experiment 1", "squeue: no answer")


def test_a_scheduler_with_a_queue_is_asked_every_two_seconds_at_most_and_less_often_while_nothing_happens(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] >= 129.0 and not life.trial.journal.exists():
            life.begins()
            life.finishes()

    monkeypatch.setattr("time.sleep", sleep)
    scheduler.has_queue = True
    assert hpc_det(*WAIT).code == 0
    assert len(scheduler.asked) == 4, "after 0, 2, 6 and 14 s"


# --- logs


def lines_of(result: Result) -> list[str]:
    """What was printed; of an attempt's border only the number."""
    return re.sub(r"(attempt \d+) on .* (-{10})$", r"\1 \2", result.out, flags=re.MULTILINE).splitlines()


def test_logs_are_the_jobs_and_the_ranks_attempt_after_attempt(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.job_prints("module loaded\n")
    life.begins()
    life.attempt_prints("srun: a word\n")
    life.rank_prints(1, "one\n")
    life.rank_prints(0, "zero\nno end")
    life.ends(Cause.PREEMPTED, Action.REQUEUE)
    life.attempt_prints("hpc-det: 10:00:09 requeue: preempted\n")
    life.begins()
    life.rank_prints(10, "ten\n")
    life.rank_prints(2, "two\n")
    assert lines_of(hpc_det("e", "logs", "1")) == [
        "[job=1] module loaded",
        "---------- attempt 1 ----------",
        "hpc-det: 10:00:01 attempt 1 begins",
        "srun: a word",
        "hpc-det: 10:00:09 requeue: preempted",
        "[rank=0] zero",
        "[rank=0] no end",
        "[rank=1] one",
        "---------- attempt 2 ----------",
        "hpc-det: 10:00:02 attempt 2 begins",
        "[rank=2] two",
        "[rank=10] ten",
    ]


def test_logs_of_one_rank(hpc_det: Command, life: Life) -> None:
    life.begins()
    life.rank_prints(0, "zero\n")
    life.rank_prints(1, "one\n")
    told = lines_of(hpc_det("e", "logs", "1", "--rank", "1"))
    assert told == ["---------- attempt 1 ----------", "[rank=1] one"]


def test_logs_of_one_rank_of_a_launcher_of_the_users_own(hpc_det: Command, life: Life) -> None:
    """hpc_det.launch.wrap_rank marks their lines in the job's log."""
    life.begins()
    life.attempt_prints("[rank=0] zero\n[rank=1] one\n[rank=11] eleven\nno rank\n")
    told = lines_of(hpc_det("e", "logs", "1", "--rank", "1"))
    assert told == ["---------- attempt 1 ----------", "[rank=1] one"]


def test_logs_of_a_rank_that_does_not_exist(hpc_det: Command, life: Life) -> None:
    assert hpc_det("e", "logs", "1", "--rank", "4").fails(2, "--rank 4", "experiment 1", "0 to 3")


def test_logs_before_there_are_any(hpc_det: Command, life: Life) -> None:
    result = hpc_det("e", "logs", "1")
    assert (result.code, result.out) == (0, "")
    assert not unnamed(result.err, "experiment 1", "no logs")
    assert unnamed(result.err, "-f") == []
    assert hpc_det("e", "logs", "1", "--json") == (0, "", "")


def test_logs_of_an_experiment_that_has_ended_without_any(hpc_det: Command, life: Life) -> None:
    SearchJournal(life.folder).cancel("ada")
    result = hpc_det("e", "logs", "1")
    assert not unnamed(result.err, "experiment 1", "no logs", "describe 1")
    assert unnamed(result.err, "-f") == ["-f"]


@pytest.mark.integration
def test_following_logs_goes_on_across_a_requeue_to_the_last_word(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    def preempted() -> None:
        life.rank_prints(0, "a whole line and a ")
        life.ends(Cause.PREEMPTED, Action.REQUEUE)

    def resumed() -> None:
        life.rank_prints(0, "torn one\n")
        life.begins()
        life.rank_prints(0, "resumed\n")

    def ended() -> None:
        life.finishes()
        life.attempt_prints("hpc-det: done\n")

    scheduler.states = [after(life.begins), after(preempted), JobState.HELD, after(resumed), after(ended)]
    result = hpc_det("e", "logs", "1", "-f")
    assert result.code == 0
    assert lines_of(result) == [
        "---------- attempt 1 ----------",
        "hpc-det: 10:00:01 attempt 1 begins",
        "[rank=0] a whole line and a torn one",
        "---------- attempt 2 ----------",
        "hpc-det: 10:00:02 attempt 2 begins",
        "[rank=0] resumed",
        "hpc-det: done",
    ]
    assert result.err.endswith("hpc-det: experiment 1: COMPLETED\n")
    assert scheduler.released == ["4711"]


# --- kill


def test_kill_leaves_its_request_and_cancels_the_job(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    assert hpc_det("e", "kill", "1").succeeds("experiment 1")
    assert scheduler.cancelled == ["4711"]
    request = read_stop(life.trial.stop, 1)
    assert request is not None
    assert request.reason == "kill"
    assert request.source == getpass.getuser()
    result = hpc_det(*WAIT)
    assert result.code == 1
    assert not unnamed(result.err, "experiment 1", "CANCELED", getpass.getuser())


def test_kill_refuses_politely_what_has_ended(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.finishes()
    assert hpc_det("e", "kill", "1").fails(2, "experiment 1", "COMPLETED")
    assert scheduler.cancelled == []
    assert not life.trial.stop.exists()


def test_kill_says_so_when_the_experiment_was_faster(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish_first() -> str:
        life.begins()
        life.finishes()
        return "ada"

    monkeypatch.setattr("getpass.getuser", finish_first)
    assert hpc_det("e", "kill", "1").succeeds("Experiment 1", "COMPLETED")


def test_kill_ends_a_job_that_was_put_back_into_the_queue_when_its_start_was_cut_short(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.states = [JobState.RUNNING, JobState.RUNNING, JobState.QUEUED]
    monkeypatch.setattr(scheduler, "cancel", lambda job_id, run: None)

    def withdraw(job_id: str, run: Run) -> None:
        assert scheduler.states == [JobState.QUEUED], "one that runs leaves by itself"
        scheduler.cancelled.append(job_id)

    monkeypatch.setattr(scheduler, "withdraw", withdraw)
    assert hpc_det("e", "kill", "1").code == 0
    assert scheduler.cancelled == ["4711"]


def test_kill_says_so_when_the_job_does_not_end(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "cancel", lambda job_id, run: None)
    monkeypatch.setattr("hpc_det.client.stopping.KILL_WAIT_S", 0.0)
    result = hpc_det("e", "kill", "1")
    assert result.code == 1
    assert not unnamed(result.err, "job 4711", "0 s")


# --- what others do to the experiment meanwhile


def paused_and_activated(life: Life) -> Callable[[], object]:
    """Its job left, and another one goes on; the journal tells of that one before its id is known."""

    def happen() -> None:
        life.search.pause("ada")
        life.ends(Cause.PAUSED, Action.PAUSE)
        life.search.lose(0, "4711")
        life.search.activate()
        life.search.submitted(first=1, count=1, stay=False)

    return happen


@pytest.mark.integration
def test_another_job_goes_on_where_the_former_ended_without_a_word(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    """That of the former is no end of the experiment."""

    def submitted() -> None:
        record = {"job_id": "4712", "scheduler": "slurm", "submitted": time.time(), "first": 1, "workers": 1}
        write_json(life.folder.job(2), record)

    def finished() -> None:
        Life(life.folder, "4712", 1).begins(1)
        life.finishes(1)

    life.begins()
    ended = JobState.ENDED
    scheduler.states = [
        after(paused_and_activated(life), ended),
        *(ended, ended, ended),
        after(submitted, ended),
        after(finished),
    ]
    assert hpc_det(*WAIT) == (0, "", "")
    assert scheduler.asked[-1] == ["4711", "4712"]


def test_wait_says_that_an_experiment_was_deleted(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states = [JobState.RUNNING, after(life.folder.remove)]
    assert hpc_det(*WAIT).fails(1, "experiment 1", "deleted")


def test_ctrl_c_ends_waiting(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    life.begins()
    life.search.pause("ada")
    life.ends(Cause.PAUSED, Action.PAUSE)
    life.search.leave(0)
    monkeypatch.setattr("hpc_det.view.watch.time.sleep", lambda seconds: os.kill(os.getpid(), signal.SIGINT))
    assert hpc_det(*WAIT).code == 130


def test_a_killed_trial_says_by_whom(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    hpc_det("trial", "kill", "1/1")
    life.ends(Cause.CANCELLED, Action.DONE)
    assert f"State:      CANCELED: by {getpass.getuser()}\n" in hpc_det("e", "describe", 1).out
