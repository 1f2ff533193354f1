"""A gang's access to its experiment's search: how long to train, and reporting the metric."""

from __future__ import annotations

import math

from hpc_det.distributed.collectives import Distributed
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, FixedSearch, Work
from hpc_det.store.folders import TrialFolder


class SearcherContext:
    """The search as one gang uses it. Collective: rank 0 reads and writes its journal, and all ranks get the answer."""

    def __init__(self, trial: TrialFolder, worker: int, distributed: Distributed) -> None:
        self._trial = trial
        self._worker = worker
        self._distributed = distributed
        self._search = SearchJournal(trial.experiment()) if distributed.is_chief else None

    def on_rank_0_alone(self) -> SearcherContext:
        """Return the same access for rank 0 alone: its methods are not collective. Call it on rank 0 only."""
        return SearcherContext(self._trial, self._worker, Distributed())

    def has_work(self) -> bool:
        """Return whether the search has work for this gang.

        It has none if the gang reported its metric before it failed, or if the gang was considered lost.
        """
        return bool(self._distributed.broadcast_json(self._work() is not None))

    def compares(self) -> bool:
        """Return whether the search chooses or ends trials by the metrics that trials report."""
        fixed = self._search is not None and isinstance(self._search.state().method, FixedSearch)
        return not self._distributed.broadcast_json(fixed)

    def until(self) -> int | None:
        """Return the length at which the search wants the metric, in the unit of `searcher.max_length`.

        None if the search names no length, or if this gang has no more work for the search.
        """
        work = self._work()
        until: int | None = self._distributed.broadcast_json(work.until if work else None)
        return until

    def report(self, value: float | None, batches: int | None = None) -> int | None:
        """Report `value`, the metric after training until `until()`. Only rank 0's value is used; None counts as NaN.

        `batches`: the length of a trial that has trained to another one than `until()`; None if it has not.

        Return the next length, or None if the search needs no more training of this trial.
        """
        if self._search and (work := self._work()):
            self._search.report(self._worker, work, math.nan if value is None else value, batches=batches)
        return self.until()

    def end(self, value: float | None = None, batches: int = 0) -> None:
        """Report that the trial itself ended its training.

        `value`: the metric at its last validation, after `batches`; None: without one. Only rank 0's is used.
        """
        if self._search and self._work():
            self._search.end(self._worker, self._trial.id, Exit.COMPLETED, value=value, batches=batches)
        self._distributed.barrier()

    def may_come_back(self) -> bool:
        """Return whether the search may want more training of this trial later."""
        closed = self._search is None or self._search.state().method.is_closed(self._trial.id)
        return not self._distributed.broadcast_json(closed)

    def _work(self) -> Work | None:
        """Return the work of this gang on rank 0, if it has any; None on the other ranks."""
        work = self._search.state().open.get(self._worker) if self._search else None
        return work if work and work.trial == self._trial.id else None
