"""What training has to say of the batches between two reports."""

from __future__ import annotations

import time
from typing import Any

import torch

from hpc_det.core.distributed import Distributed
from hpc_det.core.metrics import MetricWindow
from hpc_det.errors import UsageError
from hpc_det.pytorch.callback import Callbacks
from hpc_det.pytorch.context import PyTorchTrialContext


class TrainingReport:
    def __init__(self, context: PyTorchTrialContext, callbacks: Callbacks) -> None:
        self._context = context
        self._callbacks = callbacks
        self._keeps_batches = callbacks.overrides("on_training_workload_end")
        self._gang = context.distributed if _averages(context) else Distributed()
        self.window = MetricWindow(keep_batches=self._keeps_batches)
        self._records = 0
        self._began = time.monotonic()

    def add(self, metrics: Any, records: int) -> None:
        """What `train_batch` returned of so many records: metrics by name, or the loss."""
        self.window.add(metrics if isinstance(metrics, dict) else {"loss": _tensor(metrics)})
        self._records += records

    def close(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Collective: the metrics, the same on every rank, and facts beside them. The next report begins."""
        metrics: dict[str, Any] = dict(self.window.reduce(self._gang))
        metrics.update(self._context.reducers.reduce(self._context.distributed, training=True))
        if self._keeps_batches:
            self._callbacks.call("on_training_workload_end", metrics, self.window.batch_metrics(self._gang))
        self.window.reset()
        self._context.reducers.reset(training=True)
        return metrics, {"records_per_s": self._records_per_s()}

    def _records_per_s(self) -> float:
        """Of all ranks, by this one's count."""
        now = time.monotonic()
        rate = self._records * self._context.distributed.size / max(now - self._began, 1e-9)
        self._records, self._began = 0, now
        return rate


def _averages(context: PyTorchTrialContext) -> bool:
    """Over ranks; otherwise each has its own, and rank 0 reports its (optimizations.average_training_metrics)."""
    return bool(context.get_experiment_config().get("optimizations", {}).get("average_training_metrics", True))


def _tensor(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(f"train_batch returned {type(loss).__name__}; return the loss or a dict of metrics")
    return loss
