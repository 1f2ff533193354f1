"""An experiment from Python: its state, results, logs and control, on files that its real writers have made."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hpc_det import client
from hpc_det.cli.experiment.delete import delete_one
from hpc_det.client import ExperimentFailed, ExperimentState
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.requeue import Action, Cause
from hpc_det.schedulers.scheduler import JobState
from hpc_det.store.attempt import read_stop
from hpc_det.store.experiment_config import write_about
from hpc_det.store.folders import ExperimentFolder
from tests.cli.life import FakeScheduler, Life, random_search
from tests.facts import refused


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("hpc_det.client.experiment.CHECK_S", "hpc_det.view.logs.follow.POLL_S"):
        monkeypatch.setattr(pause, 0.001)


def test_properties_are_current_at_each_access(life: Life) -> None:
    experiment = client.get(1)
    assert (experiment.id, experiment.name, experiment.labels) == (1, "digits", [])
    write_about(life.folder, name="renamed", labels=["baseline"])
    assert (experiment.name, experiment.labels) == ("renamed", ["baseline"])
    assert experiment.config["searcher"]["metric"] == "accuracy"


def test_the_state_follows_the_files_and_the_scheduler(life: Life, scheduler: FakeScheduler) -> None:
    experiment = client.get(1)
    scheduler.states = [JobState.QUEUED, JobState.RUNNING]
    assert experiment.state is ExperimentState.QUEUED
    life.begins()
    assert experiment.state.value == "RUNNING"
    life.finishes()
    asked = len(scheduler.asked)
    assert (experiment.state, experiment.done()) == ("COMPLETED", True)
    assert len(scheduler.asked) == asked


def test_a_loop_over_the_state_does_not_query_a_queue_each_time(life: Life, scheduler: FakeScheduler) -> None:
    scheduler.has_queue = True
    experiment = client.get(1)
    assert {experiment.state for _ in range(10)} == {ExperimentState.RUNNING}
    assert len(scheduler.asked) == 1


def test_an_end_without_a_cause_is_believed_when_it_is_seen_twice(life: Life, scheduler: FakeScheduler) -> None:
    scheduler.states = [JobState.ENDED]
    experiment = client.get(1)
    assert [experiment.done() for _ in range(2)] == [False, True]


def test_the_trials_and_the_best_one(searched: Life) -> None:
    experiment = client.get(1)
    assert [trial.id for trial in experiment.trials()] == [1, 2]
    assert experiment.best_trial() == client.get_trial(1, 2)


def test_metrics_of_all_trials_have_their_numbers_and_batches(searched: Life) -> None:
    reports = list(client.get(1).metrics())
    assert [(report["trial"], report["batches"]) for report in reports] == [(1, 100), (1, 400), (2, 100), (2, 400)]
    assert reports[-1]["metrics"]["accuracy"] == 0.95


def test_the_top_checkpoint_is_that_of_the_searchers_metric_or_of_another(searched: Life) -> None:
    experiment = client.get(1)
    best, worst = experiment.top_checkpoint(), experiment.top_checkpoint("error", smaller_is_better=False)
    assert best
    assert worst
    assert (best.trial_id, best.steps, best.metrics["accuracy"]) == (2, 400, 0.95)
    assert (worst.trial_id, worst.steps) == (2, 100)
    assert len(experiment.checkpoints()) == 4


def test_a_metric_without_an_order_and_an_unknown_one_are_refused(searched: Life) -> None:
    with refused(UsageError, "error", "accuracy", "smaller_is_better"):
        client.get(1).top_checkpoint("error")
    with refused(UsageError, "f1", "accuracy", "error"):
        client.get(1).top_checkpoint("f1", smaller_is_better=True)


def test_before_the_first_report_there_is_nothing_to_show(life: Life) -> None:
    experiment = client.get(1)
    assert (experiment.best_trial(), experiment.top_checkpoint(), experiment.trials()) == (None, None, [])
    assert list(experiment.metrics()) == []


def test_the_result_is_the_best_validation(searched: Life) -> None:
    result = client.get(1).result()
    assert (result.metric, result.value, result.trial) == ("accuracy", 0.95, client.get_trial(1, 2))
    assert result.checkpoint == client.get(1).top_checkpoint()


def test_the_result_has_no_value_if_no_validation_has_the_searchers_metric(life: Life) -> None:
    life.begins()
    life.reports("validation", 100, {"error": 0.3})
    life.saves(100)
    life.finishes()
    result = client.get(1).result()
    assert (result.metric, result.value, result.checkpoint) == ("accuracy", None, None)


def test_a_failed_experiment_raises_with_cause_and_log_tail(life: Life) -> None:
    life.begins()
    life.rank_prints(0, "".join(f"line {number}\n" for number in range(100)))
    life.ends(Cause.FAILED, Action.GIVE_UP, failure="rank 0: ValueError: no such file")
    life.search.leave(0)
    with refused(ExperimentFailed, "experiment 1", "ERROR", "ValueError: no such file", "line 99") as info:
        client.get(1).result()
    error = info.value
    assert (error.state, error.log_tail[-1], len(error.log_tail)) == ("ERROR", "[rank=0] line 99", 20)
    assert client.get(1).wait() == "ERROR"


def test_waiting_ends_after_a_timeout(life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    with refused(TimeoutError, "experiment 1", "RUNNING"):
        client.get(1).wait(timeout=0.01)


def test_several_are_awaited_while_the_loop_does_other_things(root: Path, scheduler: FakeScheduler) -> None:
    lives = [Life.submitted(root) for _ in range(2)]
    for life in lives:
        life.begins()
        life.reports("validation", 400, {"accuracy": 0.9})

    async def all_of_them() -> list[client.Result]:
        waiting = asyncio.gather(*(client.get(life.id) for life in lives))
        await asyncio.sleep(0.01)
        for life in lives:
            life.finishes()
        return list(await waiting)

    assert [result.value for result in asyncio.run(all_of_them())] == [0.9, 0.9]


def test_a_failure_is_raised_by_await(life: Life) -> None:
    life.begins()
    life.ends(Cause.FAILED, Action.GIVE_UP)
    life.search.leave(0)

    async def awaited() -> client.Result:
        return await client.get(1)

    with pytest.raises(ExperimentFailed):
        asyncio.run(awaited())


def test_logs_name_the_source_of_each_line(root: Path) -> None:
    life = Life.submitted(root, **random_search(2))
    life.job_prints("module load cuda\n")
    life.begins()
    life.rank_prints(0, "epoch 1\n")
    assert [*client.get(1).logs(rank=0)] == ["[trial=1] [rank=0] epoch 1"]
    assert next(client.get(1).logs()) == "[job=1] module load cuda"
    assert [*client.get_trial(1, 1).logs(rank=0, tail=1)] == ["[rank=0] epoch 1"]


@pytest.mark.parametrize(("wrong", "facts"), [({"rank": 4}, "0 to 3"), ({"level": "loud"}, "WARNING")])
def test_logs_of_an_unknown_rank_or_level_are_refused_at_once(life: Life, wrong: dict[str, int], facts: str) -> None:
    with refused(UsageError, *wrong, facts):
        client.get(1).logs(**wrong)  # type: ignore[arg-type]


def test_followed_logs_end_with_the_experiment(life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.rank_prints(0, "epoch 1\n")
    lines = client.get(1).logs(follow=True, rank=0)
    assert next(lines) == "[rank=0] epoch 1"
    life.rank_prints(0, "epoch 2\n")
    life.finishes()
    assert list(lines) == ["[rank=0] epoch 2"]


def test_pause_cancel_and_kill_leave_their_requests(life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    experiment = client.get(1)
    for act, reason in ((experiment.pause, "pause"), (experiment.cancel, "cancel")):
        act()
        request = read_stop(life.trial.stop, attempt=1)
        assert request
        assert request.reason == reason
    experiment.kill()
    assert (experiment.state, scheduler.cancelled) == ("CANCELED", ["4711"])
    with refused(UsageError, "experiment 1", "CANCELED"):
        experiment.pause()


def test_only_what_fits_the_state_can_be_done(life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    with refused(UsageError, "experiment 1", "RUNNING"):
        client.get(1).continue_()
    with refused(UsageError, "experiment 1", "RUNNING", "paused"):
        client.get(1).activate()


def test_only_the_owner_changes_an_experiment(searched: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, top = client.get(1), client.get(1).top_checkpoint()
    assert top
    monkeypatch.setattr(ExperimentFolder, "is_own", lambda folder: False)
    changes: list[Callable[[], object]] = [
        experiment.pause,
        experiment.activate,
        experiment.cancel,
        experiment.kill,
        experiment.continue_,
    ]
    changes += [
        client.get_trial(1, 1).kill,
        top.delete,
        partial(top.add_metadata, {}),
        partial(top.remove_metadata, ()),
    ]
    for change in changes:
        with refused(UsageError, experiment.owner):
            change()
    assert experiment.state == "COMPLETED"


def test_the_umask_is_the_callers_again(life: Life, scheduler: FakeScheduler, umask: None) -> None:
    os.umask(0o027)
    life.begins()
    client.get(1).pause()
    assert os.umask(0o027) == 0o027


def test_a_deleted_experiment_has_no_properties(searched: Life) -> None:
    experiment = client.get(1)
    assert experiment.name == "digits"
    delete_one(searched.folder)
    for read in (lambda: experiment.state, experiment.trials, experiment.done, lambda: experiment.name):
        with refused(HpcDetError, "experiment 1"):
            read()


def test_experiments_are_equal_if_they_are_the_same(life: Life) -> None:
    assert client.get(1) == client.get(1)
    assert len({client.get(1), client.get(1)}) == 1
    assert repr(client.get(1)) == "<Experiment 1>"
