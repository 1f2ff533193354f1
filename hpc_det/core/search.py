"""One trial's exchange with the search: how long to train, and the validations that it reports.

`Search` is used by the loop of trial classes and by `Searching`, which any other loop uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_det.core.progress import Progress, TrainUnit, unit_from_config, unit_of
from hpc_det.distributed.metrics import scalar
from hpc_det.distributed.searcher import SearcherContext
from hpc_det.errors import UsageError, nearest
from hpc_det.search.method import better
from hpc_det.store.metrics import number_in


class Search:
    """A trial's access to the search. All ranks call each method at the same batch."""

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
        """True if the search may request more training of the trial later."""

    @property
    def takes_reports(self) -> bool:
        """True if there is a search, to which the trial reports its metric."""
        return self._searcher is not None

    def wants_training(self) -> bool:
        """Return whether there is training to do. A search that sets the length may request none of this gang."""
        if self._searcher is None or not self._sets_length or self._searcher.has_work():
            return True
        self.may_come_back = self._searcher.may_come_back()
        return False

    def length(self) -> int | None:
        """Return the length to train to, in the unit of `searcher.max_length`; None without a search."""
        return self._searcher.until() if self._searcher else None

    def next_length(self, progress: Progress, *, is_own: bool = False) -> int | None:
        """Report a trial that has reached its length, and return the next one; None if the search requests no more
        for now.

        `is_own`: the trial has reached another length than the search requested, one that its script sets.
        """
        assert self._searcher
        if progress.stop_requested:
            self.end(progress)
            return None
        until = self._searcher.report(self.validations.get(progress.steps), progress.steps if is_own else None)
        if until is None:
            self.may_come_back = self._searcher.may_come_back()
        return until

    def end(self, progress: Progress) -> None:
        """Report that the trial itself ended its training, with the value of its last validation."""
        assert self._searcher
        self._searcher.end(self.validations.get(progress.validated), progress.validated)

    def take(self, progress: Progress, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a validation. Raises UsageError if the searcher's metric is missing or not a number."""
        if self._metric is None:
            return
        value = _number(self._metric, metrics)
        self.improved = better(value, progress.best, self._smaller_is_better)
        if self.improved:
            progress.best = value
        self.validations[progress.steps] = value


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A length to which the trial trains, counted from its beginning."""

    length: int
    unit: str
    """batches, records or epochs, as in `searcher.max_length`."""
    until: TrainUnit = field(repr=False)
    """The length for `batches(loader, until=...)`; records are converted to batches."""
    progress: Progress = field(repr=False, compare=False)

    @property
    def is_reached(self) -> bool:
        """Whether the trial has trained to this length. Epochs are those that `batches` has completed."""
        return self.until.reached(self.progress)


class Searching:
    """One trial's part in the search. All ranks call each method at the same batch."""

    def __init__(
        self,
        searcher: SearcherContext | None,
        config: Mapping[str, Any],
        progress: Progress,
        global_batch_size: int | None,
    ) -> None:
        """`searcher`: the job's access to the search; None outside a job. `config`: the configuration's section
        `searcher`. `global_batch_size`: converts records to batches. Collective.
        """
        self._progress = progress
        self._global_batch_size = global_batch_size
        self._max_length: Mapping[str, int] | int | None = config.get("max_length")
        self.metric: str | None = config.get("metric")
        """The validation metric that the search compares; None without one."""
        self.compares = searcher is not None and searcher.compares()
        """Whether the search chooses or ends trials by this metric."""
        self.search = Search(
            searcher,
            sets_length=self.compares,
            metric=self.metric,
            smaller_is_better=config.get("smaller_is_better", True),
        )
        self.reports = 0
        """Number of reports to the search."""
        self.lacks_metric = False
        """Whether a validation lacked the metric, although no search compares it."""
        self._requested: int | None = self.search.length() if self.compares else None
        """The length that the search requests; None: it requests none."""

    def wants_training(self) -> bool:
        """Return whether there is training to do; the search may request none of a trial that is started again."""
        return not self.compares or self.search.wants_training()

    def operation(self) -> Operation | None:
        """Return the length that the search requests, or that of the configuration; None: no more training.

        Raises UsageError if there is neither.
        """
        if self.compares:
            return None if self._requested is None else self._to(self._requested)
        if not self._max_length:
            raise UsageError("search: searcher.max_length is not set, and no search requests a length; set it")
        length = self._max_length
        return self._to(length if isinstance(length, int) else next(iter(length.values())))

    def check(self, operation: Operation, *, is_reported: bool) -> None:
        """Raise UsageError if the body of a loop over `core.search` did less than the operation asks for."""
        asked, progress = f"{operation.length} {operation.unit}", self._progress
        if not operation.is_reached:
            raise UsageError(
                f"search: the body ended at batch {progress.steps}, epoch {progress.position.epoch}, before the length "
                f"of {asked}; use batches(loader, until=operation), or train until operation.is_reached"
            )
        if not is_reported:
            raise UsageError(
                f"search: no validation was reported at {asked}; report {self.metric!r} with group='validation' at the "
                f"end of each operation"
            )

    def take(self, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a validation. Raises UsageError if a search that compares trials lacks its metric."""
        if self.metric and not self.compares and self.metric not in metrics:
            self.lacks_metric = True
        if self.metric and (self.metric in metrics or self.compares):
            number = number_in(metrics.get(self.metric))
            self.search.take(self._progress, metrics if number is None else {**metrics, self.metric: number})

    def wants_report(self) -> bool:
        """Return whether the search waits for the metric at the length that the trial has reached."""
        return self.compares and self._requested is not None and self._to(self._requested).is_reached

    def report(self) -> bool:
        """Report the last validation to the search, and return whether it requests more training now."""
        self.reports += 1
        self._requested = self.search.next_length(self._progress)
        return self._requested is not None

    def end(self) -> str:
        """Return "waiting" if the search may request more of this trial later, or else "finished".

        A trial that ends before the length that the search requested has ended for good, if it has a validation. A
        search that compares no trials records that the trial has its length, so that `experiment continue` with a
        greater one continues it.
        """
        if self._has_fixed_length():
            self.search.next_length(self._progress)
        elif self._progress.validated >= 0 and self._is_shorter():
            self.search.end(self._progress)
        return "waiting" if self.search.may_come_back else "finished"

    def _is_shorter(self) -> bool:
        """Return whether the trial has ended before the length that its search requested."""
        return self._requested is not None if self.compares else self.search.takes_reports

    def _has_fixed_length(self) -> bool:
        """Return whether the trial has reached the length that a search requests which compares no trials."""
        if self.compares or not self.search.takes_reports:
            return False
        length = self.search.length()
        converts = self._global_batch_size or unit_of(self._max_length or 0) != "records"
        return length is not None and bool(converts) and self._to(length).is_reached

    def _to(self, length: int) -> Operation:
        unit = unit_of(self._max_length or 0)
        until = unit_from_config({unit: length}, self._global_batch_size)
        return Operation(length=length, unit=unit, until=until, progress=self._progress)


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
