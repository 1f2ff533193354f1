"""How long the saves of a trial took: whoever sets a deadline or an interval reads it.

    trials/1/saves.json   {"count", "last_s", "longest_s", "mean_s", "stall_s", "size_bytes", "batch_s"}

Rank 0 is its one writer, after each save, attempt after attempt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_det.store.files import read_json, write_json


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """Of all `count` saves of a trial so far, at least one."""

    count: int
    last_s: float
    """From the beginning until the checkpoint was committed, as the two that follow."""
    longest_s: float
    mean_s: float
    stall_s: float
    """The mean time without training: with what follows the commit, such as an upload."""
    size_bytes: int
    """Of the last checkpoint."""
    batch_s: float | None
    """The mean time of a batch in the attempt that saved last; None: it had trained none."""


def after_save(
    former: SaveTimes | None, *, committed_s: float, stall_s: float, size_bytes: int, batch_s: float | None
) -> SaveTimes:
    """With one save more."""
    count, longest_s, mean_s, mean_stall_s = 1, 0.0, 0.0, 0.0
    if former:
        count, longest_s, mean_s, mean_stall_s = former.count + 1, former.longest_s, former.mean_s, former.stall_s
        batch_s = former.batch_s if batch_s is None else batch_s
    return SaveTimes(
        count=count,
        last_s=committed_s,
        longest_s=max(longest_s, committed_s),
        mean_s=mean_s + (committed_s - mean_s) / count,
        stall_s=mean_stall_s + (stall_s - mean_stall_s) / count,
        size_bytes=size_bytes,
        batch_s=batch_s,
    )


def read_saves(path: Path) -> SaveTimes | None:
    """None before the first save."""
    data = read_json(path)
    return SaveTimes(**data) if data else None


def write_saves(path: Path, times: SaveTimes) -> None:
    write_json(path, asdict(times))
