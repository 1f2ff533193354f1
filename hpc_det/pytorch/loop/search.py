"""What the search wants of a trial, and what the trial's validations are to it."""

from __future__ import annotations

from typing import Any

from hpc_det.distributed.metrics import scalar
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.errors import UsageError, nearest
from hpc_det.pytorch.loop.schedule import Progress, Schedule
from hpc_det.search.method import better


class Search:
    """Methods are called by all ranks at the same batch."""

    def __init__(self, searcher: SearcherContext | None, schedule: Schedule) -> None:
        """`searcher` None: a run by itself, that ends where its configuration says."""
        self._searcher = searcher
        self._sets_length = schedule.search_unit is not None
        self._metric = schedule.metric
        self._smaller_is_better = schedule.smaller_is_better
        self.validations: dict[int, float] = {}
        """The searcher metric, by batches."""
        self.improved = False
        """Whether the last validation was the best so far."""
        self.may_come_back = False
        """Whether the search has let go of the trial, and may want more of it later."""

    @property
    def hears_reports(self) -> bool:
        return self._searcher is not None

    def wants_training(self) -> bool:
        """Whether the search, where it decides on the length, has work for this gang."""
        if self._searcher is None or not self._sets_length or self._searcher.has_work():
            return True
        self.may_come_back = self._searcher.may_come_back()
        return False

    def length(self) -> int | None:
        """Until when to train, in the unit of `searcher.max_length`; None where no search says so."""
        return self._searcher.until() if self._searcher else None

    def next_length(self, progress: Progress) -> int | None:
        """Report a trial that is trained as long as was asked. None: the search wants no more of it now."""
        assert self._searcher
        if progress.stop_requested:
            self._searcher.end()
            return None
        until = self._searcher.report(self.validations.get(progress.steps))
        if until is None:
            self.may_come_back = self._searcher.may_come_back()
        return until

    def take(self, progress: Progress, metrics: dict[str, Any]) -> None:
        """Of a validation. Raises UsageError where the searcher metric is missing or no number."""
        if self._metric is None:
            return
        value = _number(self._metric, metrics)
        self.improved = better(value, progress.best, self._smaller_is_better)
        if self.improved:
            progress.best = value
        self.validations[progress.steps] = value


def _number(name: str, metrics: dict[str, Any]) -> float:
    if name not in metrics:
        raise UsageError(
            f"searcher.metric: '{name}' is not among the validation metrics {sorted(metrics)} that the trial returns; "
            f"{nearest(name, metrics) or 'name one of those'}"
        )
    value = scalar(metrics[name])
    if value is None:
        kind = type(metrics[name]).__name__
        raise UsageError(f"searcher.metric: '{name}' is {kind}, no number; return one number for it")
    return value
