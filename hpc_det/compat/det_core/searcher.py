"""det.core.SearcherContext: the lengths that the search requests (upstream: determined/core/_searcher.py).

Up to Determined 0.37 a search requests several lengths, one for each rung; since 0.38 it is always one. Scripts for
either version iterate over `operations` in the same way.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

from hpc_det.compat.det_core.session import Session
from hpc_det.distributed.metrics import scalar


class Unit(enum.Enum):
    """The unit of lengths."""

    EPOCHS = "EPOCHS"
    RECORDS = "RECORDS"
    BATCHES = "BATCHES"


class SearcherMode(enum.Enum):
    """Which ranks call `operations`: all of them in step, or rank 0 alone."""

    WorkersAskChief = "WORKERS_ASK_CHIEF"
    ChiefOnly = "CHIEF_ONLY"


class SearcherOperation:
    """A length to which the script trains, counted from the beginning of the trial."""

    def __init__(self, session: Session, length: int) -> None:
        self._session = session
        self._length = length
        self._completed = False

    @property
    def length(self) -> int:
        """The length, in the unit of the configuration."""
        return self._length

    def report_progress(self, length: float) -> None:
        """Report how far the training is, in the unit of `length`. Rank 0 only, otherwise RuntimeError."""
        self._insist_on_chief("report_progress")
        if self._completed and length != self._length:
            raise RuntimeError("op.report_progress must not be called after op.report_completed")
        if self._session.chief:
            self._session.chief.report_progress(min(max(length / self._length, 0.0), 1.0))

    def report_completed(self, searcher_metric: Any) -> None:
        """Report the searcher's metric at this length. Rank 0 only, exactly once, otherwise RuntimeError.

        A value that is not a number counts as the worst one.
        """
        self._insist_on_chief("report_completed")
        if self._completed:
            raise RuntimeError("op.report_completed must be called only once")
        self._completed = True
        if (chief := self._session.chief) and chief.compares:
            chief.report_to_search(scalar(searcher_metric))

    def _insist_on_chief(self, method: str) -> None:
        if self._session.distributed.rank:
            raise RuntimeError(
                f"op.{method}: only rank 0 may call it, and this is rank {self._session.distributed.rank}"
            )


class SearcherContext:
    """The lengths that the search requests of this trial."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def operations(
        self, searcher_mode: SearcherMode = SearcherMode.WorkersAskChief, auto_ack: bool = True
    ) -> Iterator[SearcherOperation]:
        """Yield one operation after the other, until the search wants no more training. `auto_ack` has no effect.

        Raises ValueError if searcher.max_length is not configured, RuntimeError if the body has not called
        `report_completed` and, in mode ChiefOnly, on other ranks than 0.
        """
        in_step = SearcherMode(searcher_mode) is SearcherMode.WorkersAskChief
        distributed, chief = self._session.distributed, self._session.chief
        self._insist_on_length()
        self._session.uses_operations = True
        if chief is None:
            if not in_step:
                raise RuntimeError(f"searcher.operations: mode is ChiefOnly, and this is rank {distributed.rank}")
            while (length := distributed.broadcast(None)) is not None:
                yield SearcherOperation(self._session, length)
            return
        for length in self._lengths():
            if in_step:
                distributed.broadcast(length)
            operation = SearcherOperation(self._session, length)
            yield operation
            if not operation._completed:
                raise RuntimeError("op.report_completed must be called for each operation")
        if in_step:
            distributed.broadcast(None)

    def acknowledge_out_of_ops(self) -> None:
        """Do nothing, as since Determined 0.38."""

    def get_configured_units(self) -> Unit | None:
        """Return the unit of searcher.max_length; None for a length without a unit, and EPOCHS without an experiment.

        Raises ValueError if searcher.max_length is not configured.
        """
        if not self._session.is_managed:
            return Unit.EPOCHS
        length = self._insist_on_length()
        return Unit(next(iter(length)).upper()) if isinstance(length, dict) else None

    def _lengths(self) -> Iterator[int]:
        chief = self._session.chief
        assert chief
        if not chief.compares:
            yield chief.length or 1  # 1 without an experiment
            return
        while (length := chief.requested) is not None:
            yield length

    def _insist_on_length(self) -> Any:
        """Return searcher.max_length; None without an experiment. Raises ValueError if it is not configured."""
        searcher = self._session.run.spec["config"].get("searcher") or {}
        if self._session.is_managed and not searcher.get("max_length"):
            raise ValueError("searcher: set searcher.max_length in the experiment file, or do not use operations")
        return searcher.get("max_length")
