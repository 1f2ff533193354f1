"""Lengths and periods of the config, against the progress of training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hpc_det.pytorch.data import Position


@dataclass(frozen=True)
class Length:
    """One of batches, records or epochs. Records become batches of the global batch size (upstream's rule)."""

    unit: str
    amount: int

    @classmethod
    def from_config(cls, config: Mapping[str, int] | int, global_batch: int) -> Length:
        ((unit, amount),) = config.items() if isinstance(config, Mapping) else (("batches", config),)
        if unit == "records":
            return cls("batches", max(amount // global_batch, 1) if amount else 0)
        return cls(unit, amount)

    def reached(self, steps: int, position: Position) -> bool:
        """As the length of training."""
        return (position.epoch if self.unit == "epochs" else steps) >= self.amount

    def due(self, steps: int, position: Position) -> bool:
        """As a period; 0 is never due."""
        if not self.amount or not steps:
            return False
        if self.unit == "epochs":
            return position.records == 0 and position.epoch % self.amount == 0
        return steps % self.amount == 0

    def batches(self, batches_per_epoch: int) -> int:
        """For a progress bar."""
        return self.amount * batches_per_epoch if self.unit == "epochs" else self.amount
