"""`ray.tune.progress_reporter`: the table of trials that `tune.run` prints when the search has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpc_det.sgd.tune import Analysis
from hpc_det.sgd.tune.files import ITERATION

Columns = Mapping[str, str] | Iterable[str] | None


class ProgressReporter:
    """The base class of reporters. Methods that Ray calls, such as `report`, are not called."""

    def show(self, analysis: Analysis) -> None:
        """Print the results of a search."""


class CLIReporter(ProgressReporter):
    """Prints a table with one row per trial.

    Args:
        metric_columns: Metrics to show: names, or a dict of names and headings. None: the iteration and the metric of
            the search.
        parameter_columns: Hyperparameters to show, in the same form. None: all.
        max_progress_rows: Largest number of rows.
        **options: Other arguments of Ray's class, about its tables while the search runs. They have no effect on what
            `tune.run` shows then.
    """

    def __init__(
        self,
        metric_columns: Columns = None,
        parameter_columns: Columns = None,
        max_progress_rows: int = 20,
        **options: Any,
    ) -> None:
        self._metrics = _columns({ITERATION: "iter"} if metric_columns is None else metric_columns)
        self._parameters = None if parameter_columns is None else _columns(parameter_columns)
        self._rows = max_progress_rows

    def add_metric_column(self, metric: str, representation: str | None = None) -> None:
        """Add a metric to the table, with this heading."""
        self._metrics[metric] = representation or metric

    def add_parameter_column(self, parameter: str, representation: str | None = None) -> None:
        """Add a hyperparameter to the table, with this heading."""
        self._parameters = {**(self._parameters or {}), parameter: representation or parameter}

    def show(self, analysis: Analysis) -> None:
        """Print the table."""
        rows = analysis.rows()
        prefix = "config/"
        own = [name.removeprefix(prefix) for row in rows for name in row if name.startswith(prefix)]
        parameters = {name: name for name in own} if self._parameters is None else self._parameters
        headings = ["trial", "status", *parameters.values(), *self._metrics.values()]
        keys = ["trial", "status", *(f"{prefix}{name}" for name in parameters), *self._metrics]
        table = [headings, *([_cell(row.get(key)) for key in keys] for row in rows[: self._rows])]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if len(rows) > self._rows:
            print(f"... {len(rows) - self._rows} more trials")


JupyterNotebookReporter = CLIReporter


def _columns(given: Mapping[str, str] | Iterable[str]) -> dict[str, str]:
    return dict(given) if isinstance(given, Mapping) else {name: name for name in given}


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
