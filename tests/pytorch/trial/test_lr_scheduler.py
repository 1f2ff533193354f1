from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from hpc_det.pytorch import LRScheduler
from hpc_det.pytorch.trial.pytorch_context import ScheduledStep

Mode = LRScheduler.StepMode


def steps_after(mode: LRScheduler.StepMode, frequency: int, *, aggregation: int = 1, epoch: int = 6) -> list[int]:
    """Return the number of scheduler steps after each optimizer step in 12 batches."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    scheduled = ScheduledStep(scheduler, mode, frequency)
    counts = []
    for batch in range(aggregation - 1, 12, aggregation):
        optimizer.step()
        epochs = range(batch // epoch, (batch + aggregation) // epoch)
        scheduled.after_optimizer_step(batch, aggregation, lambda epochs=epochs: epochs)  # type: ignore[misc]
        counts.append(scheduler.last_epoch)
    return counts


@pytest.mark.parametrize(
    ("mode", "frequency", "counts"),
    [
        (Mode.STEP_EVERY_BATCH, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (Mode.STEP_EVERY_BATCH, 5, [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 5, [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]),
        (Mode.STEP_EVERY_EPOCH, 1, [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2]),
        (Mode.STEP_EVERY_EPOCH, 2, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]),
        (Mode.MANUAL_STEP, 1, [0] * 12),
    ],
)
def test_a_scheduler_steps_at_every_multiple_of_its_frequency(
    mode: LRScheduler.StepMode, frequency: int, counts: list[int]
) -> None:
    assert steps_after(mode, frequency) == counts


@pytest.mark.parametrize(
    ("mode", "frequency", "counts"),
    [
        (Mode.STEP_EVERY_BATCH, 1, [4, 8, 12]),  # catches up for every batch of the window
        (Mode.STEP_EVERY_BATCH, 3, [1, 2, 4]),  # after batches 3, 6, 9 and 12
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 1, [1, 2, 3]),
        (Mode.STEP_EVERY_OPTIMIZER_STEP, 2, [0, 1, 1]),  # every second optimizer step, as documented
        (Mode.MANUAL_STEP, 1, [0, 0, 0]),
    ],
)
def test_only_batches_with_an_optimizer_step_step_schedulers(
    mode: LRScheduler.StepMode, frequency: int, counts: list[int]
) -> None:
    assert steps_after(mode, frequency, aggregation=4) == counts


def test_an_epoch_ends_for_a_scheduler_at_the_last_optimizer_step_within_it() -> None:
    # Epochs of 6 batches, steps after 4, 8 and 12: the step after 8 batches is in the second epoch already.
    assert steps_after(Mode.STEP_EVERY_EPOCH, 1, aggregation=4) == [1, 1, 2]
    # Epochs of 2 batches: two epochs end between two steps.
    assert steps_after(Mode.STEP_EVERY_EPOCH, 1, aggregation=4, epoch=2) == [2, 4, 6]
