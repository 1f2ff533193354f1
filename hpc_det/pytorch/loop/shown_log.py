"""The metrics of a run that nobody follows from outside, shown as they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_det.distributed.metrics import MetricsLog


class ShownLog(MetricsLog):
    def report(self, kind: str, steps: int, total: int, metrics: Mapping[str, Any], **facts: float) -> None:
        super().report(kind, steps, total, metrics, **facts)
        values = ", ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        print(f"hpc-det: {kind} at batch {steps} of {total}: {values}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
