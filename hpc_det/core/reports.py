"""Reports of a loop's metrics: rank 0 writes them to the trial's files, TensorBoard and loggers.

A report is converted at once and written later, at most WRITE_S after the one before it: a loop may report at every
batch, and a write costs as much as a small batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from hpc_det.core.tensorboard import TensorBoard
from hpc_det.distributed.metrics import MetricsLog, spelled

WRITE_S = 1.0
"""Seconds between two writes of training metrics."""


class Reports:
    """The reports of one loop. Rank 0 alone creates one."""

    def __init__(self, log: MetricsLog, tensorboard: TensorBoard) -> None:
        self._log = log
        self._tensorboard = tensorboard
        self._waiting: list[tuple[int, dict[str, Any], float]] = []
        """Training reports that are not written yet: batches, metrics, and the time in seconds since the epoch."""
        self._write_at = 0.0
        """Seconds of time.monotonic at which the next training report is written at once."""
        self.total: int | None = None
        """Number of batches of the whole trial; None if it is unknown."""

    def training(self, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report training metrics after `steps` batches. Values on a GPU are copied, and read when they are written."""
        self._waiting.append((steps, {name: _kept(value) for name, value in metrics.items()}, time.time()))
        if time.monotonic() >= self._write_at:
            self.flush()

    def validation(self, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics, which are written at once."""
        self.flush()
        self._log.report("validation", steps, self.total, metrics)
        self._tensorboard.report("validation", steps, metrics)

    def group(self, group: str, steps: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of another group, which are written at once."""
        self._log.report_group(group, steps, metrics)
        self._tensorboard.report("training", steps, {f"{group}/{name}": value for name, value in metrics.items()})

    def flush(self) -> None:
        """Write the training reports that are waiting."""
        self._write_at = time.monotonic() + WRITE_S
        waiting, self._waiting = self._waiting, []
        records = [(steps, spelled(metrics), at) for steps, metrics, at in waiting]
        if records:
            self._log.report_all(
                [
                    {"kind": "training", "steps": steps, "total": self.total, "metrics": metrics, "time": at}
                    for steps, metrics, at in records
                ]
            )
        for steps, metrics, _ in records:
            self._tensorboard.report("training", steps, metrics)


def _kept(value: Any) -> Any:
    """Return a value that later changes of the loop do not reach."""
    if isinstance(value, torch.Tensor):
        # reading a GPU's value now would wait for the GPU
        return value.item() if value.is_cpu and not value.ndim else value.detach().clone()
    return value if isinstance(value, (int, float, str)) else spelled(value)
