"""Facts as people read them."""

from __future__ import annotations

import json
import time
from typing import Any

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def number(value: Any) -> str:
    """What is no number as JSON, or as the text that it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """In the two greatest units: `3 h 20 min`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    rest = round(seconds)
    parts: list[str] = []
    for size, unit in _UNITS:
        count, rest = divmod(rest, int(size))
        if count or parts:
            parts.append(f"{count} {unit}" if count else "")
    return " ".join(filter(None, parts[:2]))


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def moment(at: float | None) -> str:
    """Local time."""
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
