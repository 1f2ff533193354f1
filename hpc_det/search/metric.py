"""The searcher's metric: which of two values is the better one."""

from __future__ import annotations

import math


def better(value: float, than: float | None, smaller_is_better: bool) -> bool:
    """Strictly better; NaN is never better, and anything is better than nothing."""
    if math.isnan(value):
        return False
    if than is None or math.isnan(than):
        return True
    return value < than if smaller_is_better else value > than
