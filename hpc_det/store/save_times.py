"""How long the saves of a trial took: whoever sets a deadline or an interval reads it, and the report shows it.

    trials/1/saves.jsonl   {"batches", "began", "committed_s", "stall_s", "size_bytes", "batch_s",
                           "postponed"}, a line for each save

Rank 0 is its one writer, after each save, attempt after attempt.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_det.node.json_files import append_line, made, read_lines


@dataclass(frozen=True, kw_only=True)
class Save:
    """How long one save took."""

    batches: int
    """In the checkpoint."""
    began: float
    """In seconds since the epoch."""
    committed_s: float
    """From the beginning until the checkpoint was committed."""
    stall_s: float
    """The time without training: with what follows the commit, such as an upload."""
    size_bytes: int
    batch_s: float | None
    """The mean time of a batch in this attempt so far; None: it had trained none."""
    postponed: bool = False
    """It was due at an earlier batch, when the one before was still being written."""


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """Of all `count` saves of a trial so far, at least one."""

    count: int
    longest_s: float
    """From the beginning until the checkpoint was committed, as `mean_s`."""
    mean_s: float
    stall_s: float
    """The mean time without training: with what follows the commit, such as an upload."""
    size_bytes: int
    """Of the last checkpoint."""
    batch_s: float | None
    """The mean time of a batch in the attempt that saved last; None: it had trained none."""


def after_save(former: SaveTimes | None, save: Save) -> SaveTimes:
    """Return `former` with one more save."""
    count, longest_s, mean_s, mean_stall_s, batch_s = 1, 0.0, 0.0, 0.0, save.batch_s
    if former:
        count, longest_s, mean_s, mean_stall_s = former.count + 1, former.longest_s, former.mean_s, former.stall_s
        batch_s = former.batch_s if batch_s is None else batch_s
    return SaveTimes(
        count=count,
        longest_s=max(longest_s, save.committed_s),
        mean_s=mean_s + (save.committed_s - mean_s) / count,
        stall_s=mean_stall_s + (save.stall_s - mean_stall_s) / count,
        size_bytes=save.size_bytes,
        batch_s=batch_s,
    )


def read_each_save(path: Path) -> list[Save]:
    """The oldest first. Raises DamagedFile."""
    return [made(Save, line, path) for line in read_lines(path)]


def read_saves(path: Path) -> SaveTimes | None:
    """None before the first save. Raises DamagedFile."""
    times: SaveTimes | None = None
    for save in read_each_save(path):
        times = after_save(times, save)
    return times


def write_save(path: Path, save: Save) -> None:
    append_line(path, asdict(save), durable=False)
