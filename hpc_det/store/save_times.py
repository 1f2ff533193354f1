"""The durations of a trial's saves, from which deadlines and save intervals are computed.

    trials/1/saves.jsonl   {"batches", "began", "committed_s", "stall_s", "size_bytes", "batch_s",
                           "postponed"}, a line for each save

Only rank 0 writes it, after each save; it continues over all attempts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_det.node.json_files import append_line, made, read_lines


@dataclass(frozen=True, kw_only=True)
class Save:
    """The durations of one save."""

    batches: int
    """Batches trained in the checkpoint."""
    began: float
    """Beginning of the save, in seconds since the epoch."""
    committed_s: float
    """Seconds from the beginning of the save to the commit of the checkpoint."""
    stall_s: float
    """Seconds for which training waited, including work after the commit, such as an upload."""
    size_bytes: int
    batch_s: float | None
    """Mean seconds per batch in this attempt until then; None: before its first batch."""
    postponed: bool = False
    """True if the save was due at an earlier batch, when the previous one was still in flight."""


@dataclass(frozen=True, kw_only=True)
class SaveTimes:
    """The durations of all saves of a trial together."""

    count: int
    """Number of saves; at least 1."""
    longest_s: float
    """Longest time from the beginning of a save to the commit, in seconds."""
    mean_s: float
    """Mean time from the beginning of a save to the commit, in seconds."""
    stall_s: float
    """Mean time for which training waited, in seconds, including work after the commit, such as an upload."""
    size_bytes: int
    """Size of the last checkpoint."""
    batch_s: float | None
    """Mean seconds per batch in the last attempt that saved after a batch; None: no attempt has."""


def after_save(former: SaveTimes | None, save: Save) -> SaveTimes:
    """Return `former` with one more save; None: it is the first."""
    count, longest_s, mean_s, mean_stall_s, batch_s = 1, 0.0, 0.0, 0.0, save.batch_s
    if former:
        count, longest_s, mean_s, mean_stall_s = former.count + 1, former.longest_s, former.mean_s, former.stall_s
        batch_s = former.batch_s if batch_s is None else batch_s
    return SaveTimes(
        count=count,
        longest_s=max(longest_s, save.committed_s),
        mean_s=mean_s + (save.committed_s - mean_s) / count,  # running mean
        stall_s=mean_stall_s + (save.stall_s - mean_stall_s) / count,
        size_bytes=save.size_bytes,
        batch_s=batch_s,
    )


def read_each_save(path: Path) -> list[Save]:
    """Return all saves, oldest first. Raises DamagedFile."""
    return [made(Save, line, path) for line in read_lines(path)]


def read_saves(path: Path) -> SaveTimes | None:
    """Return the durations of all saves together; None before the first save. Raises DamagedFile."""
    times: SaveTimes | None = None
    for save in read_each_save(path):
        times = after_save(times, save)
    return times


def write_save(path: Path, save: Save) -> None:
    """Append one save."""
    append_line(path, asdict(save), durable=False)  # a lost line only changes an estimate
