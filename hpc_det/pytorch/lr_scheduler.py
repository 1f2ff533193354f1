"""When a learning-rate scheduler steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch


class LRScheduler:
    """Upstream's name for the place where the step modes live."""

    class StepMode(enum.Enum):
        STEP_EVERY_EPOCH = 1
        STEP_EVERY_BATCH = 2
        MANUAL_STEP = 3


@dataclass(frozen=True)
class ScheduledStep:
    """A wrapped scheduler and when the loop steps it."""

    scheduler: torch.optim.lr_scheduler.LRScheduler
    mode: LRScheduler.StepMode
    frequency: int

    def after_batch(self, batches: int) -> None:
        """`batches`: trained so far, this one included."""
        if self.mode is LRScheduler.StepMode.STEP_EVERY_BATCH and batches % self.frequency == 0:
            self.scheduler.step()

    def after_epoch(self, epochs: int) -> None:
        """`epochs`: completed so far, this one included."""
        if self.mode is LRScheduler.StepMode.STEP_EVERY_EPOCH and epochs % self.frequency == 0:
            self.scheduler.step()
