"""What a trial's metrics file says of its validations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_det.store.files import parse_line


def validation_metrics(metrics: Path) -> dict[int, dict[str, Any]]:
    """Batches -> what was validated there. Only these lines are parsed: the file may be long."""
    lines = metrics.read_bytes().splitlines() if metrics.exists() else []
    records = (parse_line(line) for line in lines if b'"validation"' in line)
    return {record["steps"]: record["metrics"] for record in records if record and record["kind"] == "validation"}


def validations(metrics: Path, metric: str) -> dict[int, float]:
    """Batches -> the value of `metric` at each validation where it was a number."""
    values = {steps: number_in(found.get(metric)) for steps, found in validation_metrics(metrics).items()}
    return {steps: value for steps, value in values.items() if value is not None}


def number_in(value: Any) -> float | None:
    """A metric as the file holds it: NaN and the infinities are words there. None for what is no number."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
