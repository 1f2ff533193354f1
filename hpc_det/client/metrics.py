"""The metric reports of trials, as plain dictionaries or as a pandas DataFrame."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hpc_det.errors import UsageError, pip_install
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import Record, number_in, read_reports

if TYPE_CHECKING:
    import pandas as pd

GROUPS = ("validation", "training")


class Metrics:
    """The metric reports of one or several trials, oldest first within each trial.

    Iterating yields a dictionary for each report:

        {"trial": 1, "group": "validation", "batches": 100, "time": 1764324000.0, "attempt": 1,
         "metrics": {"accuracy": 0.96}}

    `time` is in seconds since the epoch. Reports of work that was lost and trained again are left out. The files are
    read at each iteration, so that a second one includes new reports.
    """

    def __init__(self, trials: Sequence[TrialFolder], group: str | None) -> None:
        """`group`: one of GROUPS; None: all. Raises UsageError for another one."""
        if group not in (None, *GROUPS):
            raise UsageError(
                f"metrics: group is {group!r}; use {GROUPS[0]!r}, {GROUPS[1]!r} or None for both; reports of other "
                f"groups are in groups.jsonl of the trial's folder"
            )
        self._trials = trials
        self._group = group

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for trial in self._trials:
            for report in read_reports(trial.metrics):
                if self._group in (None, report["kind"]):
                    yield _record(trial.id, report)

    def to_frame(self) -> pd.DataFrame:
        """Return a DataFrame with a row for each report and a column for each metric.

        The other columns are `trial`, `group`, `batches`, `time` and `attempt`. Raises UsageError without pandas.
        """
        try:
            import pandas as pd
        except ImportError:
            raise UsageError(
                f"to_frame: pandas is not installed for {sys.executable}; run {pip_install('pandas')}"
            ) from None
        rows = [{**report, **report["metrics"]} for report in self]
        names = dict.fromkeys(["trial", "group", "batches", "time", "attempt", *(name for row in rows for name in row)])
        return pd.DataFrame(rows, columns=[name for name in names if name != "metrics"])


def _record(trial: int, report: Record) -> dict[str, Any]:
    return {
        "trial": trial,
        "group": report["kind"],
        "batches": report["steps"],
        "time": report["time"],
        "attempt": report["attempt"],
        "metrics": {name: _value(value) for name, value in report["metrics"].items()},
    }


def _value(written: Any) -> Any:
    """Return a metric as it was before it was written: NaN and infinities are texts in the file."""
    number = number_in(written) if isinstance(written, str) else None
    return written if number is None else number
