from __future__ import annotations

from typing import Any

import pytest

from hpc_det.errors import UsageError
from hpc_det.pytorch import Batch, Epoch, TrainUnit
from hpc_det.pytorch.data import Position
from hpc_det.pytorch.loop.progress import Progress
from hpc_det.pytorch.trial.units import period_from_config, unit_from_config


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
    with pytest.raises(UsageError, match=r"\{records: 640\}: set hyperparameters.global_batch_size"):
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
    with pytest.raises(TypeError, match=r"max_length: Batch\(value=\[2, 7\]\) is a schedule; .* such as Batch\(100\)"):
        Batch([2, 7]).reached(progress(3))


def test_lengths_in_batches_for_the_progress_bar() -> None:
    assert Epoch(3).batches(20) == 60
    assert Batch(3).batches(20) == Batch(3).batches(None) == 3
    with pytest.raises(UsageError, match=r"the training loader has no length.*give the length in batches"):
        Epoch(3).batches(None)


@pytest.mark.parametrize("value", ["7", 2.5, True, None, b"7"])
def test_an_amount_is_a_whole_number_or_several(value: Any) -> None:
    with pytest.raises(UsageError, match="Batch"):
        Batch(value)
    assert Epoch(range(3)).value == range(3)
