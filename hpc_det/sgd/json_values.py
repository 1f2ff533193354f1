"""Metrics on their way to a file of JSON, and back to numbers that compare."""

from __future__ import annotations

import math
from typing import Any


def in_json(value: Any) -> Any:
    """Numbers of numpy and tensors of one value become plain ones, what is not finite null, what JSON has not text."""
    if isinstance(value, dict):
        return {str(name): in_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (str, bool, int, type(None))):
        return value
    try:
        return in_json(value.item())
    except Exception:
        return str(value)


def number(value: Any) -> float:
    """NaN for what is none: the worst value of a metric."""
    return float(value) if isinstance(value, (int, float)) else math.nan
