"""A gang's line to the search of its experiment: how long to train, and what follows from the metric."""

from __future__ import annotations

import math

from hpc_det.distributed.collectives import Distributed
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit, Work
from hpc_det.store.folders import TrialFolder


class SearcherContext:
    """Collective: rank 0 reads and writes the search's journal, and all ranks get its answer."""

    def __init__(self, trial: TrialFolder, worker: int, distributed: Distributed) -> None:
        self._trial = trial
        self._worker = worker
        self._distributed = distributed
        self._search = SearchJournal(trial.experiment()) if distributed.is_chief else None

    def has_work(self) -> bool:
        """Not where the gang has reported before it failed, or was believed lost."""
        return bool(self._distributed.broadcast_json(self._work() is not None))

    def until(self) -> int | None:
        """The length at which the search wants the metric, in the unit of `searcher.max_length`.

        None where it names none, or where this gang does nothing for the search any more.
        """
        work = self._work()
        until: int | None = self._distributed.broadcast_json(work.until if work else None)
        return until

    def report(self, value: float | None) -> int | None:
        """The trial is trained until `until()`, and its metric has this value, which rank 0 knows.

        The length to go on to; None: the search lets go of this trial.
        """
        if self._search and (work := self._work()):
            self._search.report(self._worker, work, math.nan if value is None else value)
        return self.until()

    def end(self) -> None:
        """The trial itself wants no more training."""
        if self._search and self._work():
            self._search.end(self._worker, self._trial.id, Exit.COMPLETED)
        self._distributed.barrier()

    def may_come_back(self) -> bool:
        """Whether the search may want more of this trial later."""
        closed = self._search is None or self._search.state().method.is_closed(self._trial.id)
        return not self._distributed.broadcast_json(closed)

    def _work(self) -> Work | None:
        """What rank 0 knows that this gang has to do."""
        work = self._search.state().open.get(self._worker) if self._search else None
        return work if work and work.trial == self._trial.id else None
