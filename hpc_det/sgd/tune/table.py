"""The progress of a search: a table of its trials in a terminal, else a line for each change of a trial."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpc_det.errors import count, visible
from hpc_det.node.json_files import read_json
from hpc_det.search.state import SearchState, TrialState
from hpc_det.sgd.tune.files import DONE, ITERATION, TuneFolder, flat
from hpc_det.store.metrics import number_or_nan

REFRESH_S = 0.5
"""Shortest time in seconds between two readings of the trials' files."""
MOST_ROWS = 40
"""Rows of a table, so that it fits into a terminal: the newest trials, and those that are running."""

Shown = Callable[[SearchState], None]
Facts = tuple[dict[str, Any], dict[str, Any]]
"""The hyperparameters of a trial, and its last result."""


@contextmanager
def shown_progress(run: TuneFolder, metric: str | None, *, verbose: bool) -> Iterator[Shown]:
    """Yield a function that shows the state of the search on stdout; one that does nothing if not `verbose`."""
    if not verbose:
        yield lambda state: None
    elif sys.stdout.isatty():
        with _table(Progress(run, metric)) as shown:
            yield shown
    else:
        lines = Lines(Progress(run, metric))
        yield lines.show
        lines.show(None)


@contextmanager
def _table(progress: Progress) -> Iterator[Shown]:
    from rich.live import Live  # imported late: only terminals need it

    with Live(auto_refresh=False) as live:

        def shown(state: SearchState) -> None:
            if rows := progress.rows(state):
                live.update(_table_of(rows), refresh=True)

        yield shown
        if rows := progress.rows(None):
            live.update(_table_of(rows), refresh=True)


def _table_of(rows: list[dict[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*rows[0])
    running = [row for row in rows if row["status"] == "running"]
    others = [row for row in rows if row["status"] != "running"][-max(MOST_ROWS - len(running), 1) :]
    for row in rows if len(rows) <= MOST_ROWS else [*others, *running]:
        table.add_row(*(Text(cell) for cell in row.values()))
    table.caption = f"{count(len(rows), 'trial')}, {len(running)} running"
    return table


class Lines:
    """A line for each trial whose status has changed, or that has reported to the searcher."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._shown: dict[str, tuple[str, ...]] = {}

    def show(self, state: SearchState | None) -> None:
        for row in self._progress.rows(state):
            number, status, *_ = row.values()
            known = (status, self._progress.reported.get(int(number), ""))
            if self._shown.get(number) != known:
                self._shown[number] = known
                facts = [f"{name} {value}" for name, value in list(row.items())[2:] if value]
                print(f"trial {number}: {', '.join([status, *facts])}", flush=True)


class Progress:
    """The rows of the trials of a search."""

    def __init__(self, run: TuneFolder, metric: str | None) -> None:
        self._run = run
        self._metric = metric
        self._last: SearchState | None = None
        self._next_look = 0.0
        self._at_rest: dict[int, tuple[tuple[Any, ...], Facts]] = {}
        """For each trial without a worker, its state and what was read of it then."""
        self.reported: dict[int, str] = {}
        """By trial, its last report to the searcher, as text."""

    def rows(self, state: SearchState | None) -> list[dict[str, str]]:
        """Return a row for each trial: number, status, the hyperparameters that differ, iteration and metric.

        Empty if the last rows are younger than REFRESH_S. `state` None: the last one, whatever the time.
        """
        if state is not None:
            self._last = state
            if time.monotonic() < self._next_look:
                return []
        if self._last is None:
            return []
        self._next_look = time.monotonic() + REFRESH_S
        known = {number: self._known(number, self._last.trials[number]) for number in sorted(self._last.trials)}
        hparams = {number: its for number, (its, _) in known.items()}
        begun = [its for its in hparams.values() if its]
        every = dict.fromkeys(name for its in begun for name in its)
        names = [name for name in every if any(its.get(name) != begun[0].get(name) for its in begun)]
        return [self._row(self._last, number, *facts, names) for number, facts in known.items()]

    def _known(self, number: int, state: TrialState) -> Facts:
        """Return hyperparameters and last result of a trial, without reading files of one that is at rest again."""
        key = (state.worker, state.length, state.ended)
        if number in self._at_rest and self._at_rest[number][0] == key:
            return self._at_rest[number][1]
        trial = self._run.trial(number)
        hparams = (read_json(trial.trial) or {}).get("hparams") or {}
        facts = dict(flat(hparams)), trial.newest() or {}
        if state.worker is None:
            self._at_rest[number] = key, facts
        return facts

    def _row(
        self, state: SearchState, number: int, hparams: dict[str, Any], newest: dict[str, Any], names: list[str]
    ) -> dict[str, str]:
        trial = state.trials[number]
        self.reported[number] = f"{trial.length} {trial.value}"
        is_done = bool(newest.get(DONE)) or state.method.is_closed(number)
        waits = "completed" if is_done else "waiting"
        row = {
            "trial": str(number),
            "status": trial.ended.value if trial.ended else waits if trial.worker is None else "running",
            **{name: visible(str(hparams.get(name, ""))) for name in names},
            "iteration": str(newest.get(ITERATION, "")),
        }
        if self._metric:
            value = number_or_nan(newest.get(self._metric))
            row[self._metric] = "" if value != value else f"{value:.5g}"
        return row
