"""The content of a trial's metrics.jsonl in columns: a file of a million lines takes about 60 MB of memory."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hpc_det.store.metrics import BEGINS, Record
from hpc_det.store.save_times import Save


class Curve:
    """Values over the number of batches, oldest first; NaN for values that are not finite numbers."""

    def __init__(self) -> None:
        self.batches = array("q")
        self.values = array("d")

    def __len__(self) -> int:
        return len(self.batches)

    def append(self, batches: int, value: float) -> None:
        self.batches.append(batches)
        self.values.append(value)

    def cut(self, last: int) -> None:
        """Remove the values at more than `last` batches."""
        while self.batches and self.batches[-1] > last:
            self.batches.pop()
            self.values.pop()

    def points(self, most: int) -> list[tuple[int, float | None]]:
        """Return pairs of batches and value, with None for NaN.

        Of more than `most` points, both ends are returned, and of each of many equal parts between them the lowest and
        the highest value, and one None if the part has any.
        """
        count = len(self)
        kept: Iterable[int] = range(count)
        if count > most:
            parts = max((most - 2) // 3, 1)
            edges = [1 + part * (count - 2) // parts for part in range(parts + 1)]
            inner = (at for begin, end in pairwise(edges) for at in self._extremes(begin, end))
            kept = [0, *inner, count - 1]
        return [(self.batches[at], None if math.isnan(self.values[at]) else self.values[at]) for at in kept]

    def _extremes(self, begin: int, end: int) -> list[int]:
        """Return the indices of the lowest and the highest value of a part, and of its first NaN, if any."""
        part = self.values[begin:end]
        if not math.isnan(sum(part)):
            return sorted({begin + part.index(min(part)), begin + part.index(max(part))})
        numbers = [at for at in range(begin, end) if not math.isnan(self.values[at])]
        gap = next(at for at in range(begin, end) if math.isnan(self.values[at]))
        ends = {min(numbers, key=self.values.__getitem__), max(numbers, key=self.values.__getitem__)} if numbers else ()
        return sorted({gap, *ends})


@dataclass
class AttemptLines:
    """The times of one attempt, from its lines in metrics.jsonl."""

    began: float | None = None
    """Start of training in seconds since the epoch; None if the attempt did not report it."""
    trained: int = 0
    """Number of batches of the checkpoint from which it started."""
    reached: int = -1
    """Number of batches at its last report; -1 before the first."""
    last: float = 0.0
    """Time of its last line, in seconds since the epoch."""
    validation_ends: array[float] = field(default_factory=lambda: array("d"))
    """End of each validation that recorded its duration, in seconds since the epoch."""
    validation_s: array[float] = field(default_factory=lambda: array("d"))
    """Duration of the same validations, in seconds."""


class MetricHistory:
    """The curves of all metrics of a trial, and the times of its attempts.

    Reports that a later attempt made void are removed from the curves.
    """

    def __init__(self, lines: Iterable[Record] = (), saves: Sequence[Save] = ()) -> None:
        """Read `lines`, oldest first. The time of `saves` does not count as training in `batches_per_s`."""
        self.attempts: dict[int, AttemptLines] = {}
        self.batches = 0
        """Number of batches at the newest report, valid or not."""
        self.training: dict[str, Curve] = {}
        self.validation: dict[str, Curve] = {}
        self.validation_s = Curve()
        """Duration of each validation, in seconds."""
        self.batches_per_s = Curve()
        """Speed between two training reports, not counting the time of validations and saves."""
        self._stalls = _Stalls(saves)
        # since the last training report or start of an attempt: its time, its batches, and the seconds of validations
        self._since, self._from, self._validated_s = math.nan, 0, 0.0
        for line in lines:
            if "time" in line and "attempt" in line:
                self._take(line)

    def _take(self, line: Record) -> None:
        attempt = self.attempts.get(line["attempt"]) or self.attempts.setdefault(line["attempt"], AttemptLines())
        attempt.last = line["time"]
        if line["kind"] == BEGINS:
            self._begin(attempt, line)
            return
        self.batches = attempt.reached = line["steps"]
        if line["kind"] == "training":
            self._take_training(line)
        else:
            self._take_validation(attempt, line)

    def _begin(self, attempt: AttemptLines, line: Record) -> None:
        if attempt.began is None:
            attempt.began, attempt.trained = line["time"], line["trained"]
        for curve in (*self.training.values(), self.batches_per_s):
            curve.cut(line["trained"])
        for curve in (*self.validation.values(), self.validation_s):
            curve.cut(line["validated"])
        self._since, self._from, self._validated_s = line["time"], line["trained"], 0.0

    def _take_training(self, line: Record) -> None:
        _append(self.training, line)
        trained_s = line["time"] - self._since - self._validated_s - self._stalls.between(self._since, line["time"])
        if trained_s > 0:
            self.batches_per_s.append(line["steps"], (line["steps"] - self._from) / trained_s)
        self._since, self._from, self._validated_s = line["time"], line["steps"], 0.0

    def _take_validation(self, attempt: AttemptLines, line: Record) -> None:
        _append(self.validation, line)
        if (seconds := line.get("seconds")) is not None:
            self.validation_s.append(line["steps"], seconds)
            attempt.validation_ends.append(line["time"])
            attempt.validation_s.append(seconds)
            self._validated_s += seconds


def _append(curves: dict[str, Curve], line: Record) -> None:
    for name, value in line["metrics"].items():
        curve = curves.get(name) or curves.setdefault(name, Curve())
        curve.append(line["steps"], value if isinstance(value, (int, float)) else math.nan)


class _Stalls:
    """Seconds for which saves blocked training."""

    def __init__(self, saves: Sequence[Save]) -> None:
        self._begins = [save.began for save in saves]
        self._sums = list(accumulate((save.stall_s for save in saves), initial=0.0))

    def between(self, begin: float, end: float) -> float:
        """Return the seconds of the saves that began from `begin` until before `end`, in seconds since the epoch."""
        if not self._begins:
            return 0.0
        return self._sums[bisect_left(self._begins, end)] - self._sums[bisect_left(self._begins, begin)]
