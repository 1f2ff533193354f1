"""Means over the batches of a pass, weighted by their samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hpc_det.distributed.metrics import number_of, plain
from hpc_det.errors import UsageError
from hpc_det.sgd.operator.constants import BATCH_COUNT, NUM_SAMPLES


class AverageMeter:
    """The weighted mean of some values, and the last of them.

    Values on a GPU are summed there, in float64: nothing waits for the device before `val`, `sum` or `avg` is read.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._val: Any = 0.0
        self._sum: Any = 0.0
        self.count: float = 0

    def update(self, val: Any, n: float = 1) -> None:
        """A number, a tensor of one element, or whatever can be multiplied by `n` and added, such as an array."""
        number = val if type(val) is float else number_of(val)
        self._val = val if number is None else number
        self.count += n
        if isinstance(number, torch.Tensor):
            self._add_on_device(number, n)
        else:
            self._sum = self._sum + self._val * n

    def _add_on_device(self, value: torch.Tensor, n: float) -> None:
        if not isinstance(self._sum, torch.Tensor):
            self._sum = torch.full((), self._sum, dtype=torch.float64, device=value.device)
        self._sum.add_(value, alpha=n)

    @property
    def val(self) -> Any:
        """The last value."""
        return plain(self._val)

    @property
    def sum(self) -> Any:
        return plain(self._sum)

    @property
    def avg(self) -> Any:
        """NaN before the first sample."""
        return self.sum / self.count if self.count else math.nan


class AverageMeterCollection:
    """One AverageMeter for each metric of the batches."""

    def __init__(self) -> None:
        self._meters: dict[str, AverageMeter] = {}
        self._batches = 0
        self._samples: float = 0

    def update(self, metrics: Mapping[str, Any], n: float = 1) -> None:
        """One batch of `n` samples; what the metrics say under `num_samples` comes before `n`.

        Raises UsageError for anything but a dict.
        """
        if type(metrics) is not dict and not isinstance(metrics, Mapping):  # in every batch
            raise UsageError(f"metrics of a batch are {type(metrics).__name__}; return a dict with names and numbers")
        n = metrics.get(NUM_SAMPLES, n)
        self._batches += 1
        self._samples += n
        for name, value in metrics.items():
            if name != NUM_SAMPLES:
                self._meter(name).update(value, n)

    def _meter(self, name: str) -> AverageMeter:
        meter = self._meters.get(name)
        if meter is None:
            meter = self._meters[name] = AverageMeter()
        return meter

    def summary(self) -> dict[str, Any]:
        """`batch_count`, `num_samples`, and for each metric m: `m`, its mean over the samples, and `last_m`."""
        result: dict[str, Any] = {BATCH_COUNT: self._batches, NUM_SAMPLES: self._samples}
        for name, meter in self._meters.items():
            result[str(name)] = meter.avg
            result[f"last_{name}"] = meter.val
        return result
