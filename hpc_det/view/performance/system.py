"""system-NODE.jsonl of a trial's profile: the load of each node, by all of its users.

  {"time", "attempt", "host", "cpu_util", "memory_free", "disk_iops", "disk_read", "disk_write", "net_sent",
   "net_received", "gpus": {UUID: {"util", "memory_free"}}}

Each line is a sample. The files may be long, so they are read line by line, and only statistics are kept.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import NUMBER, Shape, insist_on, parse_line
from hpc_det.store.folders import TrialFolder
from hpc_det.view.performance.timings import Stretch, numbered

Sample = dict[str, Any]
UNITS = {
    "cpu_util": "%",
    "memory_free": "bytes",
    "disk_iops": "1/s",
    "disk_read": "bytes/s",
    "disk_write": "bytes/s",
    "net_sent": "bytes/s",
    "net_received": "bytes/s",
}
GPU_UNITS = {"util": "%", "memory_free": "bytes"}


@dataclass
class Usage:
    """Number, sum, minimum and maximum of the samples of a metric."""

    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.low, self.high = min(self.low, value), max(self.high, value)

    @property
    def mean(self) -> float:
        """Mean of at least one sample."""
        return self.total / self.count


Usages = dict[str, Usage]
"""Statistics, keyed by the name of the metric."""


def _no_usages() -> Usages:
    return defaultdict(Usage)


@dataclass
class NodeUse:
    """The load of one host, over all samples."""

    host: str
    samples: int = 0
    metrics: Usages = field(default_factory=_no_usages)
    gpus: dict[str, Usages] = field(default_factory=lambda: defaultdict(_no_usages))
    """Statistics of each GPU, keyed by its UUID."""

    def add(self, sample: Sample) -> None:
        self.samples += 1
        for name, value in _known(sample, UNITS):
            self.metrics[name].add(value)
        for uuid, metrics in sample["gpus"].items():
            for name, value in _known(metrics, GPU_UNITS):
                self.gpus[uuid][name].add(value)

    def busiest_gpus(self, count: int | None) -> list[Usages]:
        """Return the `count` busiest GPUs, since a node may have more than the trial's ranks; None returns all."""
        known = [usages for usages in self.gpus.values() if "util" in usages]
        return sorted(known, key=lambda usages: -usages["util"].mean)[:count]


def read_system(folder: Path) -> list[NodeUse]:
    """Return the load of each host, in the order of the node numbers in file names."""
    found: dict[str, NodeUse] = {}
    for sample in _samples(folder):
        found.setdefault(sample["host"], NodeUse(sample["host"])).add(sample)
    return list(found.values())


def _samples(folder: Path) -> Iterator[Sample]:
    for file in numbered(folder, "system").values():
        with file.open("rb") as lines:
            for sample in filter(None, (parse_line(line, file) for line in lines)):
                insist_on(_SHAPE, sample, file)
                insist_on(_measured(sample, UNITS), sample, file)
                for gpu in sample["gpus"].values():
                    insist_on(_measured(gpu, GPU_UNITS), gpu, file)
                yield sample


_SHAPE: Shape = {"host": str, "attempt": int, "time": NUMBER, "gpus": dict[str, dict[str, Any]]}


def _measured(metrics: Mapping[str, Any], units: Mapping[str, str]) -> Shape:
    """Return the types that the known metrics among `metrics` must have: a number or null."""
    return dict.fromkeys(metrics.keys() & units.keys(), (*NUMBER, type(None)))


Curve = list[tuple[int, float, float, float]]
"""For each number of batches: the mean, lowest and highest value of the samples since the one before."""


def over_batches(folder: Path, ranks: Mapping[int, Sequence[Stretch]], ends: Sequence[int]) -> dict[str, Curve]:
    """Return the curve of each metric over all nodes and GPUs, with a point for each number of batches in `ends`.

    Clocks of hosts may differ. So the batch at the time of a sample is taken from the stretches of a rank on the same
    host, which have times of the same clock.
    """
    clocks = _clocks(ranks)
    found: dict[str, dict[int, Usage]] = defaultdict(lambda: defaultdict(Usage))
    for sample in _samples(folder):
        stretch = _at(clocks.get((sample["host"], sample["attempt"]), []), sample["time"])
        if stretch:
            end = ends[min(bisect_left(ends, stretch.batches), len(ends) - 1)]
            for name, value in _values(sample):
                found[name][end].add(value)
    names = (*UNITS, *(f"gpu_{name}" for name in GPU_UNITS))
    return {
        name: [(end, its.mean, its.low, its.high) for end, its in sorted(found[name].items())]
        for name in names
        if name in found
    }


def _clocks(ranks: Mapping[int, Sequence[Stretch]]) -> dict[tuple[str, int], list[Stretch]]:
    """Return the stretches of the lowest rank on each host, keyed by host and attempt."""
    found: dict[tuple[str, int], list[Stretch]] = {}
    for stretch in (stretch for rank in sorted(ranks) for stretch in ranks[rank]):
        known = found.setdefault((stretch.host, stretch.attempt), [])
        if not known or known[0].rank == stretch.rank:
            known.append(stretch)
    return found


def _at(stretches: Sequence[Stretch], moment: float) -> Stretch | None:
    """Return the stretch that was being measured at this time, or None."""
    place = bisect_left(stretches, moment, key=lambda stretch: stretch.end)
    return stretches[place] if place < len(stretches) and stretches[place].begin <= moment else None


def _values(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield the metrics of the node, and those of its GPUs with the prefix gpu_."""
    yield from _known(sample, UNITS)
    for metrics in sample["gpus"].values():
        yield from ((f"gpu_{name}", value) for name, value in _known(metrics, GPU_UNITS))


def _known(values: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, float]]:
    """Yield the values that are known: a machine may report no statistics of its disks or its network."""
    yield from ((name, values[name]) for name in names if values.get(name) is not None)


# --- now


NEW_S = 60.0
"""Seconds after which a sample is outdated: a running attempt writes one every 10 s on each node."""
_END = 2**16
"""Bytes that are read from the end of a file to find its last line; a line has up to two thousand."""


def gpu_use(trial: TrialFolder) -> float | None:
    """Return the mean use of all GPUs with recent samples in percent; None without any."""
    newest = [line for file in trial.profile.glob("system-*.jsonl") if (line := _newest_line(file))]
    uses = [gpu["util"] for line in newest if time.time() - line["time"] < NEW_S for gpu in line["gpus"].values()]
    return statistics.fmean(uses) if uses else None


def _newest_line(path: Path) -> dict[str, Any] | None:
    with open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _END, 0))
        lines = file.read().splitlines()
    return next((found for line in reversed(lines) if (found := parse_line(line, path))), None)
