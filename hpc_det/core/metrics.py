"""Metrics: summed on the device between reports, averaged over batches and ranks, written by rank 0 as JSON lines."""

from __future__ import annotations

import json
import math
import numbers
import time
from collections.abc import Mapping
from typing import Any

import torch

from hpc_det.core.distributed import Distributed
from hpc_det.store.files import append_line, read_lines, write_atomic
from hpc_det.store.folders import TrialFolder


class MetricSums:
    """Running sums of scalar metrics, without synchronization: tensors are summed where they are, in float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self.batches = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        """One batch. Raises ValueError for names that differ from the last batch's, or a value that is no scalar."""
        if self.batches and metrics.keys() != self._sums.keys():
            raise ValueError(
                f"metric names changed between batches: {sorted(self._sums)} before, {sorted(metrics)} now; "
                f"return the same names every time"
            )
        for name, value in metrics.items():
            self._sums[name] = self._added(name, value)
        self.batches += 1

    def _added(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.detach().reshape(())
            known = self._sums.get(name, 0.0)
            # a new tensor at the first batch, in place afterwards: no allocation that grows
            return known.add_(value) if isinstance(known, torch.Tensor) else value.to(torch.float64) + known
        if isinstance(value, numbers.Real):
            return self._sums.get(name, 0.0) + float(value)
        raise ValueError(
            f"metric '{name}': {type(value).__name__} is no scalar; return a number or a one-element tensor"
        )

    def state(self) -> dict[str, Any]:
        """Exact, so that a resumed window goes on as if it had not been cut."""
        return {"batches": self.batches, "sums": {name: float(value) for name, value in self._sums.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.batches, self._sums = state["batches"], dict(state["sums"])

    def mean_over_ranks(self, distributed: Distributed) -> dict[str, float]:
        """Collective. Every batch of every rank weighs the same; a rank without batches takes part with nothing."""
        names: list[str] = next((known for known in distributed.gather_json(sorted(self._sums)) if known), [])
        values = torch.tensor(
            [float(self._sums.get(name, 0.0)) for name in names] + [self.batches], dtype=torch.float64
        )
        *sums, batches = distributed.sum(values).tolist()
        return {name: value / batches for name, value in zip(names, sums, strict=True)}


class MetricsLog:
    """The trial's metrics file; rank 0 only."""

    def __init__(self, trial: TrialFolder, attempt: int) -> None:
        self._path = trial.metrics
        self._attempt = attempt

    def begin_at(self, *, trained: int, validated: int) -> None:
        """Forget what a lost stretch beyond the checkpoint had reported: it is run again."""
        reached = {"training": trained, "validation": validated}
        records = [record for record in read_lines(self._path) if record["steps"] <= reached[record["kind"]]]
        write_atomic(self._path, "".join(f"{json.dumps(record)}\n" for record in records))

    def validations(self, metric: str) -> dict[int, float]:
        """Batches -> the value of `metric` at each validation so far."""
        records = [record for record in read_lines(self._path) if record["kind"] == "validation"]
        return {record["steps"]: float(record["metrics"][metric]) for record in records if metric in record["metrics"]}

    def report(self, kind: str, steps: int, total: int, metrics: Mapping[str, float]) -> None:
        """`kind`: training or validation; `total`: batches of the whole trial."""
        append_line(
            self._path,
            {
                "kind": kind,
                "steps": steps,
                "total": total,
                "metrics": {name: spelled(value) for name, value in metrics.items()},
                "attempt": self._attempt,
                "time": time.time(),
            },
        )


def spelled(value: float) -> float | str:
    """JSON has no NaN and no infinities; upstream's words for them."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
