"""What was tried, what survived, and what was lost: printed at the end of a run."""

from __future__ import annotations

from collections import Counter

tried: Counter[str] = Counter()
lost: Counter[str] = Counter()


def survived(what: str) -> None:
    """One more trial of `what`, after which all that was promised was there."""
    tried[what] += 1


def shown() -> list[str]:
    rows = [("WHAT", "TRIED", "SURVIVED", "LOST")]
    rows += [(what, str(tried[what] + lost[what]), str(tried[what]), str(lost[what])) for what in {**tried, **lost}]
    rows.append(("all", str(tried.total() + lost.total()), str(tried.total()), str(lost.total())))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
