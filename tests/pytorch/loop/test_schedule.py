from __future__ import annotations

from typing import Any

import pytest

from hpc_det.checkpoint.prune import Policy
from hpc_det.config.merge import merge
from hpc_det.pytorch import Batch, Epoch
from hpc_det.pytorch.loop.progress import Progress
from hpc_det.pytorch.loop.schedule import Schedule
from tests.pytorch.trials import CONFIG


def schedule(**config: Any) -> Schedule:
    return Schedule.from_config(merge(CONFIG, config), 4)


def test_a_schedule_is_read_from_an_experiments_config() -> None:
    assert schedule() == Schedule(
        max_length=Epoch(3),
        reporting_period=Batch(4),
        validation_period=Batch(5),
        checkpoint_period=Batch(7),
        search_unit="epochs",
        global_batch_size=4,
        metric="loss",
    )
    kept = schedule(checkpoint_storage={"save_experiment_best": 3, "save_trial_best": 2, "save_trial_latest": 0})
    assert kept.kept == Policy(experiment_best=3, trial_best=2, trial_latest=0)
    assert schedule(min_validation_period={"batches": 0}).validation_period is None


def test_one_batch_of_everything_is_a_test() -> None:
    test = schedule(perform_initial_validation=True).for_test()
    start, end = Progress(), Progress(steps=1)
    assert not test.validation_is_due(start)
    assert test.finished(end)
    assert test.report_is_due(end)
    assert test.validation_is_due(end)
    assert test.validation_batches == 1


def test_a_validation_comes_once_at_its_batch_and_at_the_end() -> None:
    due = [
        s
        for s in range(12)
        if Schedule(max_length=Batch(12), validation_period=Batch(5)).validation_is_due(Progress(steps=s))
    ]
    assert due == [5, 10]
    ended = Schedule(max_length=Batch(12))
    assert ended.validation_is_due(Progress(steps=12))
    assert not ended.validation_is_due(Progress(steps=12, validated=12))
    assert Schedule(max_length=Batch(12)).validation_is_due(Progress(steps=3, stop_requested=True))


@pytest.mark.parametrize("wanted", [True, False])
def test_a_first_validation_comes_where_it_is_asked_for(wanted: bool) -> None:
    assert Schedule(max_length=Batch(12), initial_validation=wanted).validation_is_due(Progress()) is wanted


@pytest.mark.parametrize(
    ("policy", "validated", "improved", "due"),
    [
        ("all", True, False, True),
        ("all", False, True, False),
        ("best", True, True, True),
        ("best", True, False, False),
        ("none", True, True, False),
    ],
)
def test_the_policy_saves_after_a_validation(policy: Any, validated: bool, improved: bool, due: bool) -> None:
    progress = Progress(steps=5, validated=5 if validated else 3)
    schedule = Schedule(max_length=Batch(9), checkpoint_policy=policy)
    assert schedule.validated_is_kept(progress, improved=improved) is due


def test_nothing_is_saved_before_the_first_batch() -> None:
    every = Schedule(max_length=Batch(9), checkpoint_policy="all", checkpoint_period=Batch(1))
    assert not every.checkpoint_is_due(Progress(validated=0))
    assert not every.validated_is_kept(Progress(validated=0), improved=True)
    assert every.checkpoint_is_due(Progress(steps=1))
