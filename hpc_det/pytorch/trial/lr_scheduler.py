"""When a learning-rate scheduler steps.

Never on a batch without an optimizer step: with gradients aggregated over several batches, what the batches since the
last optimizer step were owed is made up for at the next one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch


class LRScheduler:
    """Upstream's name for the place where the step modes live."""

    class StepMode(enum.Enum):
        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3
        STEP_EVERY_OPTIMIZER_STEP = 4


@dataclass(frozen=True)
class ScheduledStep:
    """A wrapped scheduler and when the loop steps it."""

    scheduler: torch.optim.lr_scheduler.LRScheduler
    mode: LRScheduler.StepMode
    frequency: int

    def after_optimizer_step(self, batch: int, aggregation: int, epochs: Callable[[], range]) -> None:
        """After the optimizer step of `batch` (from 0), which ends a window of `aggregation` batches.

        `epochs()`: the epochs that end before the next optimizer step, whose batch lies in a later one.
        """
        for _ in range(self._steps(batch, aggregation, epochs)):
            self.scheduler.step()

    def _steps(self, batch: int, aggregation: int, epochs: Callable[[], range]) -> int:
        if self.mode is LRScheduler.StepMode.STEP_EVERY_BATCH:
            return _multiples(range(batch + 1 - aggregation, batch + 1), self.frequency)
        if self.mode is LRScheduler.StepMode.STEP_EVERY_OPTIMIZER_STEP:
            step = batch // aggregation
            return _multiples(range(step, step + 1), self.frequency)
        if self.mode is LRScheduler.StepMode.STEP_EVERY_EPOCH:
            return _multiples(epochs(), self.frequency)
        return 0


def _multiples(numbers: range, frequency: int) -> int:
    """How many n of `numbers` complete a period: (n + 1) % frequency == 0."""
    return numbers.stop // frequency - numbers.start // frequency
