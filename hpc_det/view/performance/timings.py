"""timings-RANK.jsonl of a trial's profile: how each rank spent its time.

  {"time", "attempt", "host", "epoch", "batches", "count", "wall_s", "records", "samples_per_second",
   "seconds": {"dataloader_next": 0.2, "train_batch": 1.5, ...}, "exposed_communication_s"}

Each line describes a stretch: `count` batches that were measured together, at the end of which `batches` were trained
in all. Batches that a later attempt trained again count only there. Times are from the host's clock, and are never
compared with those of other hosts.
"""

from __future__ import annotations

import enum
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import NUMBER, Shape, insist_on, read_lines


class Part(str, enum.Enum):
    """The parts of a rank's time, which add up to all of it."""

    COMPUTING = "computing"
    LOADING = "loading"
    """Waiting for the data loader."""
    COPYING = "copying"
    """Copies between host and device."""
    COMMUNICATING = "communicating"
    """Exchanging gradients, as far as computing does not hide it, and metrics; includes waiting for other ranks."""
    VALIDATING = "validating"
    SAVING = "saving"
    CALLBACKS = "callbacks"
    REST = "rest"
    """The loop itself, and all time that no timing covers."""


_PARTS = {
    "dataloader_next": Part.LOADING,
    "to_device": Part.COPYING,
    "from_device": Part.COPYING,
    "train_batch": Part.COMPUTING,
    "step_lr_schedulers": Part.COMPUTING,
    "reduce_metrics": Part.COMMUNICATING,
    "validation": Part.VALIDATING,
    "checkpoint": Part.SAVING,
}
CALLBACKS = "callbacks."
"""Prefix of the timings of callbacks."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The time that one rank spent, in total or in one stretch."""

    rank: int
    host: str
    count: int
    """Number of batches."""
    records: int
    wall_s: float
    """Duration in seconds, including time that no timing covers."""
    seconds: dict[str, float]
    """Seconds of each timing, keyed by its name."""
    exposed_s: float | None
    """Seconds of train_batch in which gradients were exchanged and nothing was computed; None if unknown."""

    def parts(self) -> dict[Part, float]:
        """Return the seconds of each part."""
        found = dict.fromkeys(Part, 0.0)
        for name, amount in self.seconds.items():
            found[Part.CALLBACKS if name.startswith(CALLBACKS) else _PARTS.get(name, Part.REST)] += amount
        exposed_s = min(self.exposed_s or 0.0, self.seconds.get("train_batch", 0.0))
        found[Part.COMPUTING] -= exposed_s
        found[Part.COMMUNICATING] += exposed_s
        found[Part.REST] += max(self.wall_s - sum(self.seconds.values()), 0.0)
        return found

    def share(self, part: Part) -> float:
        """Return the share of the time that a part takes, from 0 to 1."""
        parts = self.parts()
        return parts[part] / (sum(parts.values()) or 1.0)


@dataclass(frozen=True, kw_only=True)
class Stretch(Spent):
    """Batches that were measured together."""

    attempt: int
    end: float
    """Seconds since the epoch."""
    batches: int
    """Number of batches trained at its end."""
    samples_per_second: float
    """Samples per second of all ranks together."""

    @property
    def first(self) -> int:
        """Number of batches trained before it."""
        return self.batches - self.count

    @property
    def begin(self) -> float:
        return self.end - self.wall_s


def read_timings(folder: Path) -> dict[int, list[Stretch]]:
    """Return the stretches of each rank that has a file, oldest first, without those that were trained again."""
    files = numbered(folder, "timings")
    found = {rank: [_stretch(rank, line, file) for line in read_lines(file)] for rank, file in files.items()}
    kept = _kept(stretch for stretches in found.values() for stretch in stretches)
    standing = {
        rank: [its for its in stretches if its.batches <= kept[its.attempt]] for rank, stretches in found.items()
    }
    return {rank: stretches for rank, stretches in standing.items() if stretches}


_SHAPE: Shape = {
    **dict.fromkeys(("attempt", "batches", "count", "records"), int),
    **dict.fromkeys(("time", "wall_s", "samples_per_second"), NUMBER),
    "host": str,
    "seconds": dict[str, float],
    "exposed_communication_s": (*NUMBER, type(None)),
}


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """Return the files name-NUMBER.jsonl by their numbers. Other files, such as copies by users, are ignored."""
    pattern = re.compile(rf"{name}-(\d+)\.jsonl", re.ASCII)
    found = ((pattern.fullmatch(file.name), file) for file in folder.glob(f"{name}-*.jsonl"))
    return dict(sorted((int(match[1]), file) for match, file in found if match))


def _stretch(rank: int, line: dict[str, Any], file: Path) -> Stretch:
    insist_on(_SHAPE, line, file)
    return Stretch(
        rank=rank,
        host=line["host"],
        attempt=line["attempt"],
        end=line["time"],
        batches=line["batches"],
        count=line["count"],
        records=line["records"],
        wall_s=line["wall_s"],
        samples_per_second=line["samples_per_second"],
        seconds=line["seconds"],
        exposed_s=line["exposed_communication_s"],
    )


def _kept(stretches: Iterable[Stretch]) -> dict[int, float]:
    """Return how many batches of each attempt were kept: the fewest from which a later attempt resumed."""
    begins: dict[int, int] = {}
    for stretch in stretches:
        begins[stretch.attempt] = min(stretch.first, begins.get(stretch.attempt, stretch.first))
    kept, fewest = dict[int, float](), math.inf
    for attempt in sorted(begins, reverse=True):
        kept[attempt] = fewest
        fewest = min(fewest, begins[attempt])
    return kept


def total(stretches: Sequence[Stretch]) -> Spent:
    """Return the sum of a rank's stretches, of at least one. The host is that of the last stretch."""
    return Spent(
        rank=stretches[-1].rank,
        host=stretches[-1].host,
        count=sum(stretch.count for stretch in stretches),
        records=sum(stretch.records for stretch in stretches),
        wall_s=sum(stretch.wall_s for stretch in stretches),
        seconds=_added(stretch.seconds for stretch in stretches),
        exposed_s=_exposed_s(stretches),
    )


def _exposed_s(stretches: Sequence[Stretch]) -> float | None:
    """Return the seconds of exposed communication; stretches without a timed exchange get the mean of the others."""
    known = [(stretch.exposed_s, stretch.count) for stretch in stretches if stretch.exposed_s is not None]
    if not known:
        return None
    return sum(seconds for seconds, _ in known) * sum(its.count for its in stretches) / sum(count for _, count in known)


def _added(seconds: Iterable[dict[str, float]]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for each in seconds:
        found.update(each)
    return dict(found)


def samples_per_second(stretches: Sequence[Stretch]) -> float | None:
    """Return the mean samples per second of all ranks together, given the stretches of one rank; None without any."""
    wall_s = sum(stretch.wall_s for stretch in stretches)
    samples = sum(stretch.samples_per_second * stretch.wall_s for stretch in stretches)
    return samples / wall_s if wall_s else None
