"""The pace of a training: throughput, epoch and remaining time, from its reports and from the search's progress."""

from __future__ import annotations

from typing import NamedTuple

from hpc_det.config.merge import Tree
from hpc_det.store.metrics import Record


class Epoch(NamedTuple):
    """The epoch that is being trained, counted from 1, and the number of epochs."""

    current: int
    total: int


def epoch(batches: int, total_batches: int | None, searcher: Tree) -> Epoch | None:
    """Return the epoch of a trial after `batches`; None unless searcher.max_length is in epochs."""
    epochs = (searcher.get("max_length") or {}).get("epochs")
    if not epochs or not total_batches:
        return None
    return Epoch(min(batches * epochs // total_batches + 1, epochs), epochs)


class Pace:
    """The speed of a trial, from its training reports, each of which is given to `take` once, oldest first."""

    def __init__(self) -> None:
        self.samples_per_s: float | None = None
        """Throughput of all ranks together in the newest report; None if its training loop does not measure it."""
        self.newest_batches_per_s: float | None = None
        """Batches per second between the two newest reports, in wall time."""
        self._attempt: int | None = None
        self._first = self._last = (0.0, 0)
        """Time in seconds and batches of the first and the newest report of the attempt."""

    def take(self, report: Record) -> None:
        if report["kind"] != "training" or "time" not in report:
            return
        now = (report["time"], report["steps"])
        if report.get("attempt") != self._attempt:
            self._attempt, self._first, self.newest_batches_per_s = report.get("attempt"), now, None
        else:
            self.newest_batches_per_s = _rate(self._last, now)
        self._last = now
        self.samples_per_s = report.get("samples_per_second")

    def remaining_s(self, batches: int, total: int | None) -> float | None:
        """Return the seconds from `batches` to `total`, at the mean speed of the attempt; None if one is not known.

        The mean is one in wall time, so that it contains validations and saves, but not the start of the attempt.
        """
        rate = _rate(self._first, self._last)
        return max(total - batches, 0) / rate if rate and total else None


def _rate(first: tuple[float, int], last: tuple[float, int]) -> float | None:
    """Return the batches per second between two reports; None if nothing was trained between them."""
    seconds, batches = last[0] - first[0], last[1] - first[1]
    return batches / seconds if seconds > 0 and batches > 0 else None


def remaining_of_search_s(progress: float, worked_s: float) -> float | None:
    """Return the seconds that a search still needs at its mean pace; None before its first progress.

    `progress`: from 0 to 1. `worked_s`: the seconds in which at least one of its workers was present.
    """
    return worked_s * (1 - progress) / progress if progress > 0 else None
