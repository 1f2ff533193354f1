"""Values and tables as people read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

LONGEST_VALUE = 60
"""Characters of a metric that is no number."""


def number(value: Any) -> str:
    """A metric as people read it; what is no number, such as a matrix, as JSON, and its beginning only."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.5g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def values_in_words(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


def iso(moment: float) -> str:
    """Local time with its offset, to the second."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


_ONE = {"batches": "batch", "records": "record", "epochs": "epoch"}


def length_in_words(amount: int, unit: str) -> str:
    """`1 batch`, `2 epochs`."""
    return f"{amount} {_ONE[unit] if amount == 1 else unit}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with cells of the same column below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def size(size_bytes: int) -> str:
    """`512 B`, `1.5 MiB`."""
    amount, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def count(number: int, thing: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {thing}{'s' * (number != 1)}"
