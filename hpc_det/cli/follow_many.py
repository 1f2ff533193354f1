"""--follow of an experiment with several trials: how the search goes on, live on a terminal, else as plain lines."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from hpc_det.cli import story
from hpc_det.cli.state import ExperimentState, ExperimentView
from hpc_det.cli.story import Metrics
from hpc_det.cli.trials import BestTrial, TrialCounts, best_trial, counted, length_unit
from hpc_det.cli.values import length_in_words, number
from hpc_det.cli.watch import POLL_S, Watch
from hpc_det.search.method import Exit
from hpc_det.search.metric import better
from hpc_det.search.state import Entry


class Display(Protocol):
    def update(self, state: ExperimentState) -> None:
        """Called at every look at the files."""


def watch_many(watch: Watch) -> ExperimentState:
    """Returns the final state."""
    with _display(watch.view) as display:
        while True:
            state = watch.state()
            display.update(state)
            if state.is_final:
                return state
            time.sleep(POLL_S)


def summary_of_many(view: ExperimentView, state: ExperimentState, seconds: float) -> Iterator[str]:
    """What came of it: the state, the best trial and its checkpoint."""
    counts = counted(view.search, is_running=False)
    failed = [f"{counts.failed} failed"] if counts.failed else []
    created = f"Experiment {view.id}: {state.value} with {counts.created} trials in {seconds:.0f} s"
    yield ", ".join([created, *failed, *_invalid(counts)])
    best = best_trial(view.told, view.config["searcher"])
    if best is None:
        return
    yield f"Best validation: {best_in_words(best, view)}"
    trial = view.folder.trial(best.trial)
    if checkpoint := story.checkpoint_to_take(trial, Metrics.read(trial, view.config["searcher"]).best):
        yield f"Checkpoint: {checkpoint.path} (batch {checkpoint.steps})"


def _invalid(counts: TrialCounts) -> list[str]:
    return [f"{counts.invalid} invalid"] if counts.invalid else []


def best_in_words(best: BestTrial, view: ExperimentView) -> str:
    return f"{best.metric} {number(best.value)} of trial {best.trial}{_at(best.length, view)}"


def _at(length: int | None, view: ExperimentView) -> str:
    unit = length_unit(view.config["searcher"])
    if length is None or unit is None:
        return ""
    return f" at {length_in_words(length, unit)}"


@contextmanager
def _display(view: ExperimentView) -> Iterator[Display]:
    console = Console()
    if not console.is_terminal:
        yield Lines(view)
        return
    bar = Bar(view)
    with Live(console=console, get_renderable=lambda: bar.progress, auto_refresh=False) as live:
        bar.refresh = live.refresh
        yield bar


class Lines:
    """One line for each change of the state, each report of a trial to the search and each failure."""

    def __init__(self, view: ExperimentView) -> None:
        self._view = view
        self._searcher = view.config["searcher"]
        self._state: ExperimentState | None = None
        self._read = 0
        self._best: float | None = None

    def update(self, state: ExperimentState) -> None:
        if not state.is_final:
            self._tell(state)
        for entry in self._view.told[self._read :]:
            click.echo(self._reported(entry) if entry["event"] == "reported" else self._ended(entry))
        self._read = len(self._view.told)
        self._tell(state)

    def _tell(self, state: ExperimentState) -> None:
        if state is not self._state:
            self._state = state
            click.echo(f"experiment {self._view.id}: {state.value}")

    def _reported(self, entry: Entry) -> str:
        trial, value = entry["trial"], math.nan if entry["value"] is None else entry["value"]
        is_best = better(value, self._best, self._searcher["smaller_is_better"])
        self._best = value if is_best else self._best
        mark = " (best)" if is_best else ""
        end = ", completed" if self._view.search.method.is_closed(trial) else ""
        at = _at(entry["until"], self._view)
        return f"trial {trial}{at}: {self._searcher['metric']} {number(value)}{mark}{end}"

    def _ended(self, entry: Entry) -> str:
        trial, how = entry["trial"], Exit(entry["how"])
        failed = how in (Exit.FAILED, Exit.INVALID_HP)
        why = f": {story.why_not_completed(self._view.folder.trial(trial))}" if failed else ""
        return f"trial {trial} ended: {how.value}{why}"


class Bar:
    """The search's progress in one line, with the best trial so far."""

    def __init__(self, view: ExperimentView) -> None:
        self.refresh: Callable[[], None] = lambda: None
        self._view = view
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeElapsedColumn(),
        )
        self._task = self.progress.add_task("", total=1.0, told="")

    def update(self, state: ExperimentState) -> None:
        search = self._view.search
        counts = counted(search, is_running=state is ExperimentState.RUNNING)
        best = best_trial(self._view.told, self._view.config["searcher"])
        parts = [f"{counts.ended}/{counts.expected} trials", f"{counts.running} running", *_invalid(counts)]
        self.progress.update(
            self._task,
            description=f"experiment {self._view.id} {state.value}",
            completed=search.method.progress,
            told=", ".join([*parts, *([f"best {best_in_words(best, self._view)}"] if best else [])]),
        )
        self.refresh()
