from __future__ import annotations

from typing import Any

import pytest

from hpc_det.checkpoint.retention import Policy
from hpc_det.config.merge import merge
from hpc_det.core.progress import Position, Progress, period_from_config, unit_from_config
from hpc_det.errors import UsageError
from hpc_det.pytorch import Batch, Epoch, TrainUnit
from hpc_det.pytorch.loop.schedule import Schedule
from tests.facts import refused
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


def test_a_limit_ends_a_training_before_the_length_of_the_search() -> None:
    limited = Schedule(max_length=Epoch(3), limit=Batch(10), reporting_period=Batch(100), search_unit="epochs")
    assert limited.batches(6) == 10
    assert limited.batches(2) == 6
    assert limited.next_boundary(5) == 10
    assert [limited.finished(Progress(steps=steps)) for steps in (9, 10)] == [False, True]
    assert limited.finished(Progress(steps=6, position=Position(epoch=3)))
    assert limited.until(1).limit == Batch(10)
    assert limited.for_test().limit is None
    assert limited.as_configured(CONFIG).limit is None


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


def progress(steps: int, epoch: int = 0, *, epoch_ended: bool = False) -> Progress:
    return Progress(steps=steps, position=Position(epoch), epoch_ended=epoch_ended)


@pytest.mark.parametrize(
    ("config", "unit"),
    [
        ({"batches": 100}, Batch(100)),
        ({"epochs": 3}, Epoch(3)),
        ({"records": 640}, Batch(10)),
        ({"records": 700}, Batch(10)),
        ({"records": 1}, Batch(1)),
        (100, Batch(100)),
    ],
)
def test_records_become_batches_of_64(config: Any, unit: TrainUnit) -> None:
    assert unit_from_config(config, 64) == unit
    assert period_from_config(config, 64) == unit


def test_records_need_a_global_batch_size() -> None:
    with refused(UsageError, "{records: 640}", "hyperparameters.global_batch_size"):
        unit_from_config({"records": 640}, None)


@pytest.mark.parametrize("config", [0, {"batches": 0}, {"epochs": 0}, {"records": 0}])
def test_a_period_of_zero_in_a_config_is_none(config: Any) -> None:
    assert period_from_config(config, 64) is None


@pytest.mark.parametrize(
    ("steps", "due", "reached"),
    [(0, False, False), (4, False, False), (5, True, True), (6, False, True), (10, True, True)],
)
def test_batches_are_due_at_every_multiple_and_reached_once(steps: int, due: bool, reached: bool) -> None:
    assert Batch(5).due(progress(steps)) is due
    assert Batch(5).reached(progress(steps)) is reached


@pytest.mark.parametrize(
    ("epoch", "ended", "due", "reached"),
    [
        (0, False, False, False),
        (1, True, False, False),
        (2, True, True, True),
        (2, False, False, True),
        (4, True, True, True),
    ],
)
def test_epochs_are_due_when_the_last_batch_ended_one(epoch: int, ended: bool, due: bool, reached: bool) -> None:
    assert Epoch(2).due(progress(20, epoch, epoch_ended=ended)) is due
    assert Epoch(2).reached(progress(20, epoch, epoch_ended=ended)) is reached


def test_a_schedule_is_due_at_what_it_names() -> None:
    assert [steps for steps in range(10) if Batch([2, 7]).due(progress(steps))] == [2, 7]
    assert [epoch for epoch in range(10) if Epoch(range(3, 5)).due(progress(1, epoch, epoch_ended=True))] == [3, 4]


@pytest.mark.parametrize("unit", [Batch(0), Batch(-1)])
def test_a_period_below_one_is_due_after_every_batch_but_never_before_the_first(unit: Batch) -> None:
    assert [unit.due(progress(steps)) for steps in range(3)] == [False, True, True]


def test_a_schedule_is_no_length() -> None:
    with refused(TypeError, "max_length: ", "Batch(value=[2, 7])", "Batch(100)"):
        Batch([2, 7]).reached(progress(3))


def test_lengths_in_batches_for_the_progress_bar() -> None:
    assert Epoch(3).batches(20) == 60
    assert Batch(3).batches(20) == Batch(3).batches(None) == 3
    with refused(UsageError, "training loader", "batches"):
        Epoch(3).batches(None)


@pytest.mark.parametrize("value", ["7", 2.5, True, None, b"7"])
def test_an_amount_is_a_whole_number_or_several(value: Any) -> None:
    with refused(UsageError, "Batch", repr(value)):
        Batch(value)
    assert Epoch(range(3)).value == range(3)
