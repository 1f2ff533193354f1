"""Rows of `hpc-det top`, from the files and the scheduler's answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.cli.top import experiments
from hpc_det.cli.top.experiments import Answers, Experiments, Job, Row, Seen
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from hpc_det.store.experiments import ExperimentStore
from tests.cli.life import FakeScheduler, Life, halving


class Looking:
    """Both tasks that `hpc-det top` repeats: asking the scheduler and reading the files."""

    def __init__(self, root: Path) -> None:
        self.answers = Answers(root)
        self.experiments = Experiments(ExperimentStore(root), self.answers)

    def look(self) -> Seen:
        self.answers.ask(self.experiments.look().job_ids)
        return self.experiments.look()


@pytest.fixture
def looking(root: Path, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch) -> Looking:
    monkeypatch.setattr(experiments, "ROUND_S", 0.0)
    return Looking(root)


def only(seen: Seen) -> Row:
    (row,) = seen.rows
    return row


def test_what_is_under_way_comes_before_what_is_paused_and_that_before_what_has_ended(
    root: Path, looking: Looking
) -> None:
    paused, ended, *others = (Life.submitted(root, job_id=str(4711 + number)) for number in range(4))
    ended.begins()
    ended.finishes()
    paused.search.pause("ada")
    for life in others:
        life.begins()
    assert [row.summary.id for row in looking.look().rows] == [4, 3, 1, 2]


def test_losses_grow_with_the_file(root: Path, looking: Looking) -> None:
    life = Life.submitted(root)
    life.begins()
    for batches in (10, 20):
        life.reports("training", batches, {"lr": 0.1, "loss": 1 / batches})
    assert only(looking.look()).losses == (0.1, 0.05)
    life.reports("training", 30, {"lr": 0.1, "loss": 0.01})
    life.reports("validation", 30, {"accuracy": 0.8})
    row = only(looking.look())
    assert row.losses == (0.1, 0.05, 0.01)
    assert (row.attempts, row.slots, row.slots_wanted) == (1, 4, 0)
    assert (row.training["loss"], row.validation) == (0.01, {"accuracy": 0.8})
    assert row.summary.best == {"metric": "accuracy", "value": 0.8, "batches": 30, "trial": 1}


def test_losses_that_a_new_attempt_makes_void_are_gone(root: Path, looking: Looking) -> None:
    life = Life.submitted(root)
    life.begins()
    for batches, loss in ((10, 3.0), (20, 2.0), (30, 1.0)):
        life.reports("training", batches, {"loss": loss})
    looking.look()
    life.ends(Cause.PREEMPTED, Action.REQUEUE, steps=10)
    life.begins()
    life.reports("training", 20, {"loss": 1.5})
    assert only(looking.look()).losses == (3.0, 1.5)


def test_losses_of_a_search_are_those_of_a_trial_that_is_trained(root: Path, looking: Looking) -> None:
    life = Life.submitted(root, workers=3, **halving(8))
    life.begins(0)
    life.begins(1)
    life.reports("training", 50, {"loss": 1.0})
    assert only(looking.look()).trial == 1
    life.reaches(0.9)  # and the third worker takes its place
    life.reports("training", 50, {"loss": 2.0}, trial=2)
    row = only(looking.look())
    assert (row.trial, row.losses) == (2, (2.0,))
    assert (row.slots, row.slots_wanted) == (4, 4)


def test_a_job_that_waits_is_told_with_its_reason(root: Path, looking: Looking, scheduler: FakeScheduler) -> None:
    Life.submitted(root)
    scheduler.states, scheduler.reason = [JobState.QUEUED], "Priority"
    seen = looking.look()
    row = only(seen)
    assert (row.summary.state.value, row.waits_for, row.slots, row.slots_wanted) == ("QUEUED", "Priority", 0, 4)
    assert seen.jobs == [Job(job_id="4711", experiment=1, state=JobState.QUEUED, reason="Priority")]
    assert seen.job_ids == {"slurm": ["4711"]}


def test_jobs_that_have_ended_are_in_no_queue(root: Path, looking: Looking, scheduler: FakeScheduler) -> None:
    Life.submitted(root).begins()
    scheduler.states = [JobState.ENDED]
    seen = looking.look()
    assert (seen.jobs, only(seen).summary.state.value) == ([], "ERROR")


def test_an_experiment_that_is_deleted_is_gone(root: Path, looking: Looking) -> None:
    life = Life.submitted(root)
    life.begins()
    looking.look()
    life.folder.remove()
    assert looking.look().rows == []


@pytest.mark.parametrize("file", ["metrics", "jobs behind its job"])
def test_damaged_files_hide_no_other_experiment(root: Path, looking: Looking, file: str) -> None:
    Life.submitted(root).begins()
    damaged = Life.submitted(root)
    damaged.begins()
    if file == "metrics":
        damaged.trial.metrics.mkdir()
    else:
        damaged.folder.next_jobs(1, 0).write_text('{"jobs": [')
    rows = looking.look().rows
    assert [(row.summary.id, row.summary.name) for row in rows] == [(2, "(files damaged)"), (1, "digits")]


def test_between_rounds_only_what_is_under_way_is_looked_at(
    root: Path, looking: Looking, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life.submitted(root)
    life.begins()
    looking.look()
    monkeypatch.setattr("hpc_det.view.experiments.look", lambda store: pytest.fail("all were looked at"))
    monkeypatch.setattr(looking.experiments, "_next_round", float("inf"))
    life.reports("training", 10, {"loss": 0.5})
    assert only(looking.look()).losses == (0.5,)
