"""Where a trial is: the one thing that everything due at a batch is derived from. The same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_det.pytorch.data import Position


@dataclass
class Progress:
    steps: int = 0
    """Batches trained."""
    position: Position = field(default_factory=Position)
    """`position.epoch` is also the number of epochs completed."""
    epoch_started: bool = False
    """Whether the last batch was the first of its epoch."""
    epoch_ended: bool = False
    """Whether the last batch completed an epoch; it may have begun the next one, too."""
    validated: int = -1
    """Batches at the last validation."""
    best: float | None = None
    """The best value of the searcher metric so far."""
    stop_requested: bool = False
    """By the trial, and known to all ranks."""

    @property
    def starts_epoch(self) -> bool:
        """Whether the next batch is the first of its epoch."""
        return self.epoch_ended or self.steps == 0

    @property
    def last_epoch(self) -> int:
        """Of the last batch."""
        return self.position.epoch - self.epoch_ended

    def advance(self, position: Position, batches: int) -> None:
        """So many more are trained, of one epoch, which led to `position`."""
        self.epoch_started = self.starts_epoch and batches == 1
        self.steps += batches
        self.epoch_ended = position.epoch > self.position.epoch
        self.position = position
