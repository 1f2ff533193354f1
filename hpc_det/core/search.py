"""One trial's exchange with the search: how long to train, and the validations that it reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpc_det.core.progress import Progress
from hpc_det.distributed.metrics import scalar
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.errors import UsageError, nearest
from hpc_det.search.method import better


class Search:
    """The search as a trial sees it. All ranks call each method at the same batch."""

    def __init__(
        self, searcher: SearcherContext | None, *, sets_length: bool, metric: str | None, smaller_is_better: bool
    ) -> None:
        """`searcher` is None for a run without a search, which ends at the length of its configuration.

        `sets_length`: whether the search determines how long the trial trains. `metric`: the validation metric that
        the search compares; None: none.
        """
        self._searcher = searcher
        self._sets_length = sets_length
        self._metric = metric
        self._smaller_is_better = smaller_is_better
        self.validations: dict[int, float] = {}
        """Values of the searcher's metric by number of batches."""
        self.improved = False
        """True if the last validation was the best one."""
        self.may_come_back = False
        """True if the search may want more of the trial later."""

    @property
    def takes_reports(self) -> bool:
        """True if there is a search, to which the trial reports its metric."""
        return self._searcher is not None

    def wants_training(self) -> bool:
        """Return whether there is training to do. A search that sets the length may have no work for this gang."""
        if self._searcher is None or not self._sets_length or self._searcher.has_work():
            return True
        self.may_come_back = self._searcher.may_come_back()
        return False

    def length(self) -> int | None:
        """Return the length to train to, in the unit of `searcher.max_length`; None without a search."""
        return self._searcher.until() if self._searcher else None

    def next_length(self, progress: Progress) -> int | None:
        """Report a trial that has reached its length, and return the next one; None if the search wants no more for
        now.
        """
        assert self._searcher
        if progress.stop_requested:
            self._searcher.end()
            return None
        until = self._searcher.report(self.validations.get(progress.steps))
        if until is None:
            self.may_come_back = self._searcher.may_come_back()
        return until

    def end(self) -> None:
        """Report that the trial itself ended its training."""
        assert self._searcher
        self._searcher.end()

    def take(self, progress: Progress, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a validation. Raises UsageError if the searcher's metric is missing or not a number."""
        if self._metric is None:
            return
        value = _number(self._metric, metrics)
        self.improved = better(value, progress.best, self._smaller_is_better)
        if self.improved:
            progress.best = value
        self.validations[progress.steps] = value


def _number(name: str, metrics: Mapping[str, Any]) -> float:
    if name not in metrics:
        raise UsageError(
            f"searcher.metric: '{name}' is not among the validation metrics {sorted(metrics)} that the trial returns; "
            f"{nearest(name, metrics) or 'use one of those'}"
        )
    value = scalar(metrics[name])
    if value is None:
        kind = type(metrics[name]).__name__
        raise UsageError(f"searcher.metric: '{name}' is {kind}, expected a number; return one number for it")
    return value
