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
    epoch_ended: bool = False
    """Whether the last batch completed an epoch; it may have begun the next one, too."""
    validated: int = -1
    """Batches at the last validation."""
    best: float | None = None
    """The best value of the searcher metric so far."""
    stop_requested: bool = False
    """By the trial: a stop in the last validation must not make it train on."""

    def advance(self, position: Position) -> None:
        """One more batch is trained, which led to `position`."""
        self.steps += 1
        self.epoch_ended = position.epoch > self.position.epoch
        self.position = position
