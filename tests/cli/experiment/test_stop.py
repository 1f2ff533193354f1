"""What changes the fate of an experiment while it lives: pause, activate, cancel. `kill` stands in test_wait."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.storage import TrialStorage
from hpc_det.node.json_files import write_json
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import CommandError, JobState
from hpc_det.search.method import Work
from hpc_det.store.attempt import read_stop
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life, halving, random_search
from tests.facts import unnamed


def reason(life: Life, trial: int = 1) -> str | None:
    request = read_stop(life.folder.trial(trial).stop, attempt=1)
    return request.reason if request else None


@pytest.mark.parametrize("command", ["pause", "cancel"])
def test_trials_are_asked_to_save_and_nobody_gets_another(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, command: str
) -> None:
    life.begins()
    assert hpc_det("e", command, "1").code == 0
    assert reason(life) == command
    assert scheduler.withdrawn == ["4711"], "what waits in the queue has nothing to do any more"
    assert scheduler.cancelled == [], "what runs leaves by itself"
    assert life.search.ask(1, "4712") is None


def test_a_queue_that_does_not_answer_keeps_no_trial_from_saving(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job_id: str, run: object) -> None:
        raise CommandError("qstat: refused")

    monkeypatch.setattr(scheduler, "withdraw", refuse)
    life.begins()
    done = hpc_det("e", "pause", "1")
    assert (done.code, reason(life)) == (0, "pause")
    assert not unnamed(done.err, "job 4711", "qstat: refused")


def test_a_paused_experiment_is_paused_once_its_trial_has_left(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.begins()
    assert hpc_det("e", "pause", "1").succeeds("experiment 1", "hpc-det experiment activate 1")
    assert "RUNNING" in hpc_det("e", "list").out, "it still saves"
    life.ends(Cause.PAUSED, Action.PAUSE, steps=120)
    life.search.lose(0, "4711")
    scheduler.states = [JobState.ENDED]
    told = hpc_det("e", "describe", "1").out
    assert f"PAUSED: by {getpass.getuser()}\n" in told
    assert "paused at batch 120" in told
    assert life.search.state().method.next_work() == Work(1, 400), "the trial is to be gone on with"
    assert hpc_det("e", "pause", "1").succeeds("Experiment 1", "already", getpass.getuser())


def test_only_a_paused_experiment_is_activated(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    assert hpc_det("e", "activate", "1").fails(2, "experiment 1", "RUNNING")


def test_a_cancelled_experiment_says_by_whom(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    assert hpc_det("e", "cancel", "1").succeeds("experiment 1")
    life.ends(Cause.CANCELLED, Action.DONE, steps=120)
    assert hpc_det("e", "wait", "1").code == 1
    assert "CANCELED" in hpc_det("e", "list").out


@pytest.mark.parametrize("command", ["pause", "cancel"])
def test_what_has_ended_is_left_alone(hpc_det: Command, life: Life, scheduler: FakeScheduler, command: str) -> None:
    life.begins()
    life.finishes()
    assert hpc_det("e", command, "1").fails(2, "experiment 1", "COMPLETED")


def test_jobs_that_wait_behind_others_are_withdrawn_too(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    write_json(life.folder.next_jobs(1, 0), {"jobs": ["4711", "4712"]})
    hpc_det("e", "pause", "1")
    assert scheduler.withdrawn == ["4711", "4712"]


def test_what_has_left_the_queue_is_not_withdrawn(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    """Slurm forgets it after minutes, and scancel fails then."""
    life.begins()
    scheduler.states = [JobState.RUNNING, JobState.ENDED]
    assert hpc_det("e", "pause", "1").code == 0
    assert scheduler.withdrawn == []


def test_a_pause_that_came_to_no_end_can_be_asked_for_again(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    life.begins()
    life.search.pause("ada")
    assert hpc_det("e", "pause", "1").succeeds("Experiment 1", "already", "ada")
    assert (reason(life), scheduler.withdrawn) == ("pause", ["4711"])


def test_a_job_that_waits_says_what_for(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states, scheduler.reason = [JobState.QUEUED], "JobHeldUser: let it go with `hpc-det job release`"
    told = hpc_det("e", "describe", "1").out
    assert "QUEUED: JobHeldUser: let it go with `hpc-det job release`\n" in told


# --- several at once


def test_a_range_and_a_list_name_each_experiment_once(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    for job in range(11, 15):
        Life.submitted(root, job_id=str(job))
    code, out, err = hpc_det("e", "pause", "1,3-4,3")
    assert (code, err) == (0, "")
    assert [line.split(";")[0] for line in out.splitlines()] == [f"Paused experiment {number}" for number in (1, 3, 4)]


@pytest.mark.parametrize("ids", ["", ",", "1,", "2-1", "1-", "x", "1-99999999", "-1-2"])
def test_what_is_no_list_of_ids_is_told(hpc_det: Command, life: Life, ids: str) -> None:
    code, out, err = hpc_det("e", "pause", "--", ids)
    assert (code, out) == (2, "")
    assert not unnamed(err, 12)


def test_all_that_are_killed_end_and_what_had_ended_is_told(
    hpc_det: Command, root: Path, scheduler: FakeScheduler
) -> None:
    lives = [Life.submitted(root, job_id=str(job)) for job in (11, 12, 13)]
    lives[1].begins()
    lives[1].finishes()
    code, out, err = hpc_det("e", "kill", "1-3")
    assert (code, out) == (2, "Killed experiment 1\nKilled experiment 3\n")
    assert not unnamed(err, "experiment 2", "COMPLETED")
    assert sorted(scheduler.cancelled) == ["11", "13"]


# --- one trial alone


def test_a_trial_is_killed_alone(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, workers=2, **random_search(2))
    life.begins(0)
    life.begins(1)
    said = "Killed trial 1/2: it ends without another checkpoint\n"
    assert hpc_det("t", "kill", "1/2") == (0, said, "")
    assert (reason(life, 1), reason(life, 2)) == (None, "kill")
    assert (scheduler.cancelled, life.search.state().cancelled) == ([], None)


def test_a_trial_that_nobody_trains_cannot_be_killed(hpc_det: Command, root: Path, scheduler: FakeScheduler) -> None:
    life = Life.submitted(root, **halving(4))
    life.begins()
    life.reaches(0.9)
    code, _, err = hpc_det("t", "kill", "1/1")
    assert (code, reason(life, 1)) == (2, None)
    assert not unnamed(err, "trial 1/1", "PAUSED")
    life.ends(Cause.FAILED, Action.GIVE_UP)
    assert hpc_det("t", "kill", "1/2").fails(2, "trial 1/2", "ERROR")


def test_a_killed_experiment_keeps_what_its_policy_says(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    for steps in (100, 200, 300):
        life.saves(steps)
    assert hpc_det("e", "kill", "1").succeeds("experiment 1")
    assert [checkpoint.steps for checkpoint in committed(life.trial.checkpoints)] == [300]


def paused(life: Life) -> None:
    """With a checkpoint of each 100 batches, and nobody left who would collect them."""
    life.begins()
    for steps in (100, 200, 300):
        life.saves(steps)
    life.search.pause("ada")
    life.ends(Cause.PAUSED, Action.PAUSE, steps=300)
    life.search.lose(0, "4711")


def test_a_paused_experiment_that_is_cancelled_keeps_what_its_policy_says(
    hpc_det: Command, life: Life, scheduler: FakeScheduler
) -> None:
    paused(life)
    assert hpc_det("e", "cancel", "1").code == 0
    assert [checkpoint.steps for checkpoint in committed(life.trial.checkpoints)] == [300]


def test_so_does_one_that_waits_in_the_queue_again(hpc_det: Command, life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    for steps in (100, 200, 300):
        life.saves(steps)
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=300)
    scheduler.states = [JobState.QUEUED, JobState.QUEUED, JobState.ENDED]
    assert hpc_det("e", "cancel", "1").code == 0
    assert scheduler.withdrawn == ["4711"]
    assert [checkpoint.steps for checkpoint in committed(life.trial.checkpoints)] == [300]


def test_a_checkpoint_that_does_not_go_is_no_failure_of_the_end(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(storage: object, uuid: str) -> None:
        raise PermissionError(13, "Permission denied", uuid)

    monkeypatch.setattr(TrialStorage, "remove", refuse)
    paused(life)
    done = hpc_det("e", "cancel", "1")
    assert (done.code, len(committed(life.trial.checkpoints))) == (0, 3)
    assert not unnamed(done.err, "note", "checkpoint_storage", "[Errno 13]")


@pytest.mark.parametrize(("command", "word"), [("pause", "paused"), ("cancel", "canceled")])
def test_what_was_asked_of_trials_that_still_save_is_told(
    hpc_det: Command, life: Life, scheduler: FakeScheduler, command: str, word: str
) -> None:
    life.begins()
    hpc_det("e", command, "1")
    asked = f"State:      RUNNING: {getpass.getuser()} has {word} it, and its trials are saving\n"
    assert asked in hpc_det("e", "describe", "1").out
