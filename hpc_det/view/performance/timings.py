"""timings-RANK.jsonl of a trial's profile: what the time of each rank went into.

    {"time", "attempt", "host", "epoch", "batches", "count", "wall_s", "records", "samples_per_second",
     "seconds": {"dataloader_next": 0.2, "train_batch": 1.5, ...}, "exposed_communication_s"}

A line is a stretch of `count` batches, at the end of which `batches` were trained in all. What was lost and trained
again counts once, as it was trained last. Moments are of the host's own clock, and compared with no other host's.
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
    """What the time of a rank goes into. All parts together are its whole time."""

    COMPUTING = "computing"
    LOADING = "loading"
    """It waits for its data loader."""
    COPYING = "copying"
    """Between host and device."""
    COMMUNICATING = "communicating"
    """Of gradients, what computing does not hide; of metrics, all. With it, waiting for other ranks."""
    VALIDATING = "validating"
    SAVING = "saving"
    CALLBACKS = "callbacks"
    REST = "rest"
    """The loop's own."""


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
"""What the names of callbacks' timings begin with."""


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What the time of a rank went into."""

    rank: int
    host: str
    count: int
    """Batches."""
    records: int
    wall_s: float
    seconds: dict[str, float]
    """By the name of the timing."""
    exposed_s: float | None
    """Of train_batch: the exchange of gradients that computing did not hide; None: nobody knows."""

    def parts(self) -> dict[Part, float]:
        """In seconds."""
        found = dict.fromkeys(Part, 0.0)
        for name, amount in self.seconds.items():
            found[Part.CALLBACKS if name.startswith(CALLBACKS) else _PARTS.get(name, Part.REST)] += amount
        exposed_s = min(self.exposed_s or 0.0, self.seconds.get("train_batch", 0.0))
        found[Part.COMPUTING] -= exposed_s
        found[Part.COMMUNICATING] += exposed_s
        found[Part.REST] += max(self.wall_s - sum(self.seconds.values()), 0.0)
        return found

    def share(self, part: Part) -> float:
        """Of its time, 0 .. 1."""
        parts = self.parts()
        return parts[part] / (sum(parts.values()) or 1.0)


@dataclass(frozen=True, kw_only=True)
class Stretch(Spent):
    """Batches that were measured together."""

    attempt: int
    end: float
    """In seconds since the epoch."""
    batches: int
    """Trained in all at its end."""
    samples_per_second: float
    """Of all ranks."""

    @property
    def first(self) -> int:
        """The batches that were trained before it."""
        return self.batches - self.count

    @property
    def begin(self) -> float:
        return self.end - self.wall_s


def read_timings(folder: Path) -> dict[int, list[Stretch]]:
    """Of each rank that has a file, oldest first, without what was trained again."""
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
    """The files name-NUMBER.jsonl, by their numbers. Others, such as a copy that somebody made, are none of ours."""
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
    """Return for each attempt the fewest batches with which a later one began: those were not trained again."""
    begins: dict[int, int] = {}
    for stretch in stretches:
        begins[stretch.attempt] = min(stretch.first, begins.get(stretch.attempt, stretch.first))
    kept, fewest = dict[int, float](), math.inf
    for attempt in sorted(begins, reverse=True):
        kept[attempt] = fewest
        fewest = min(fewest, begins[attempt])
    return kept


def total(stretches: Sequence[Stretch]) -> Spent:
    """Of a rank, at least one; on the host where it was last."""
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
    """Where some do not know it, as much a batch as in those that do: a short one has no exchange that was timed."""
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
    """Of all ranks, over the time of one rank's stretches."""
    wall_s = sum(stretch.wall_s for stretch in stretches)
    samples = sum(stretch.samples_per_second * stretch.wall_s for stretch in stretches)
    return samples / wall_s if wall_s else None
