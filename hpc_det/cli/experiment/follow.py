"""The option --follow: shows a training live, as a progress bar on a terminal, as lines of text elsewhere."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from hpc_det.cli.output import show
from hpc_det.config.merge import Tree
from hpc_det.errors import count, length_in_words, visible
from hpc_det.node.json_files import parse_line
from hpc_det.requeue import Action
from hpc_det.search.method import Exit, better
from hpc_det.search.state import BestTrial, Entry, Length, best_trial, length_of
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.metrics import Record, reports_of
from hpc_det.view.attempt_sentences import attempt_in_words
from hpc_det.view.formatting import duration, number, values_in_words
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import (
    Metrics,
    checkpoint_to_take,
    read_attempts,
    why_not_completed,
)
from hpc_det.view.trials import TrialCounts, counted
from hpc_det.view.watch import POLL_S, Watch, insist_on_completion


class Training(Protocol):
    """The progress of an experiment. A display calls either `news` or `bar` repeatedly; each call reads the files."""

    def news(self) -> Iterator[str]:
        """Yield a line for each event since the last call."""

    def bar(self, state: ExperimentState) -> RenderableType:
        """Return what the terminal shows at the moment."""

    def summary(self, state: ExperimentState, seconds: float) -> Iterator[str]:
        """Yield lines with the result; `seconds`: how long the training was watched."""


def follow(experiment: ExperimentFolder) -> None:
    """Show the training until it ends, then its result. Raises HpcDetError unless it is COMPLETED."""
    began = time.monotonic()
    watch = Watch(experiment)
    training: Training = ManyTrials(watch.view) if watch.view.has_many_trials else OneTrial(watch.view)
    try:
        state = _watch(watch, training)
    except KeyboardInterrupt:
        click.echo(
            f"\nStopped following; experiment {experiment.id} continues.\n"
            f"Follow it: hpc-det experiment logs {experiment.id} -f\n"
            f"End it:    hpc-det experiment kill {experiment.id}"
        )
        raise
    for line in training.summary(state, time.monotonic() - began):
        show(line)
    insist_on_completion(watch.view, state)
    click.echo(f"Next: hpc-det experiment describe {experiment.id}")


def _watch(watch: Watch, training: Training) -> ExperimentState:
    """Update the display until the experiment ends; return its final state."""
    with _display(watch.view.id, training) as display:
        while True:
            state = watch.state()
            display.update(state)
            if state.is_final:
                return state
            time.sleep(POLL_S)


class Display(Protocol):
    """A view of the training: printed lines or a progress bar."""

    def update(self, state: ExperimentState) -> None: ...


@contextmanager
def _display(experiment_id: int, training: Training) -> Iterator[Display]:
    console = Console()
    if not console.is_terminal:
        yield PrintedLines(experiment_id, training)
        return
    with Live(console=console, auto_refresh=False) as live:  # refreshed by `update`, not by a thread
        yield Bar(live, training)


class PrintedLines:
    """Printed lines: one for each change of state and one for each event."""

    def __init__(self, experiment_id: int, training: Training) -> None:
        self._id = experiment_id
        self._training = training
        self._state: ExperimentState | None = None

    def update(self, state: ExperimentState) -> None:
        if not state.is_final:  # a final state is printed after the last events
            self._tell(state)
        for line in self._training.news():
            show(line)
        self._tell(state)

    def _tell(self, state: ExperimentState) -> None:
        if state is not self._state:
            self._state = state
            click.echo(f"experiment {self._id}: {state.value}")


class Bar:
    """A progress bar on a terminal."""

    def __init__(self, live: Live, training: Training) -> None:
        self._live = live
        self._training = training

    def update(self, state: ExperimentState) -> None:
        self._live.update(self._training.bar(state), refresh=True)


class OneTrial:
    """The training of an experiment with a single trial."""

    def __init__(self, view: ExperimentView) -> None:
        self._view = view
        self._reader = MetricsReader(view.folder.trial(), view.config["searcher"])
        self._training: Mapping[str, float | str] = {}
        self._attempts = 0
        """Number of ended attempts that `news` has read."""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("", total=None)

    def news(self) -> Iterator[str]:
        """Yield a line for each new validation, with the last training metrics, and for each attempt that another one
        follows.
        """
        for record in self._reader.read():
            if record["kind"] == "training":
                self._training = record["metrics"]
            else:
                of = f" of {record['total']}" if record["total"] else ""
                yield f"batch {record['steps']}{of}: {_last(self._training, record['metrics'])}"
        for attempt in read_attempts(self._view.folder.trial())[self._attempts :]:
            if attempt.is_open:
                return
            self._attempts += 1
            if attempt.action in (Action.REQUEUE, Action.RESTART):  # the summary contains other ends
                yield attempt_in_words(attempt, time.time(), is_over=False)

    def bar(self, state: ExperimentState) -> Group:
        """Return the progress bar with the last metrics below it."""
        self._reader.read()
        metrics = self._reader.metrics
        description = f"experiment {self._view.id} {state.value}"
        self._progress.update(self._task, description=description, completed=metrics.batches, total=metrics.total)
        last = Text(visible(_last(metrics.training, metrics.validation)), no_wrap=True, overflow="ellipsis")
        return Group(self._progress, last)

    def summary(self, state: ExperimentState, seconds: float) -> Iterator[str]:
        """Yield the state, the best validation and its checkpoint."""
        trial = self._view.folder.trial()
        metrics = Metrics.read(trial, self._view.config["searcher"])
        trained = f"{count(metrics.batches, 'batch')} in {duration(seconds)}"
        yield f"Experiment {self._view.id}: {state.value} after {trained}"
        if best := metrics.best:
            yield f"Best validation: {best.metric} {number(best.value)} at batch {best.batches}"
        elif lacking := metrics.lacking_metric:
            yield f"Best validation: not known: {lacking}"
        if checkpoint := checkpoint_to_take(trial, metrics.best):
            yield f"Checkpoint: {checkpoint.path} (batch {checkpoint.steps})"


class MetricsReader:
    """The metrics of a trial, to which each call of `read` adds the reports that are new in the file."""

    def __init__(self, trial: TrialFolder, searcher: Tree) -> None:
        self._trial, self._searcher = trial, searcher
        self._tail = Tail(trial.metrics)
        self.metrics = Metrics(searcher)

    def read(self) -> list[Record]:
        """Return the reports that are new since the last call."""
        lines = [record for line in self._tail.lines() if (record := parse_line(line, self._trial.metrics))]
        reports = reports_of(lines)
        if len(reports) < len(lines):  # one line is the start of an attempt, which may make earlier reports void
            self.metrics = Metrics.read(self._trial, self._searcher)
        else:
            self.metrics.take(reports)
            self.metrics.advance(self._trial)
        return reports


def _last(training: Mapping[str, float | str], validation: Mapping[str, float | str]) -> str:
    shown = {"training": training, "validation": validation}
    return "   ".join(f"{kind}: {values_in_words(metrics)}" for kind, metrics in shown.items() if metrics)


class ManyTrials:
    """The training of an experiment with several trials."""

    def __init__(self, view: ExperimentView) -> None:
        self._view = view
        self._searcher = view.config["searcher"]
        self._read = 0
        """Number of reports of the view for which `news` has yielded a line."""
        self._best: float | None = None
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task("", total=1.0, counts="")

    def news(self) -> Iterator[str]:
        """Yield a line for each new entry in the search's journal about a report or the end of a trial."""
        for entry in self._view.reports[self._read :]:
            yield self._reported(entry) if "value" in entry else self._ended(entry)
        self._read = len(self._view.reports)

    def bar(self, state: ExperimentState) -> Progress:
        """Return the progress bar, in one line with the numbers of trials and the best value."""
        search = self._view.search
        counts = counted(search, is_running=state.has_job)
        best = best_trial(self._view.reports, self._searcher)
        parts = [f"{counts.ended}/{count(counts.expected, 'trial')}", f"{counts.running} running", *_invalid(counts)]
        self._progress.update(
            self._task,
            description=f"experiment {self._view.id} {state.value}",
            completed=search.method.progress,
            counts=", ".join([*parts, *([f"best {_in_words(best)}"] if best else [])]),
        )
        return self._progress

    def summary(self, state: ExperimentState, seconds: float) -> Iterator[str]:
        """Yield the state, the best trial and its checkpoint."""
        view = self._view
        counts = counted(view.search, is_running=False)
        failed = [f"{counts.failed} failed"] if counts.failed else []
        created = f"Experiment {view.id}: {state.value} with {count(counts.created, 'trial')} in {duration(seconds)}"
        yield ", ".join([created, *failed, *_invalid(counts)])
        best = best_trial(view.reports, self._searcher)
        if best is None:
            return
        yield f"Best validation: {_in_words(best)}"
        trial = view.folder.trial(best.trial)
        kept = Metrics.read(trial, self._searcher).best  # may be better than all values that the search has seen
        if checkpoint := checkpoint_to_take(trial, kept):
            is_other = kept is not None and kept.batches == checkpoint.steps and kept.value != best.value
            value = f": {kept.metric} {number(kept.value)}" if kept and is_other else ""
            yield f"Checkpoint: {checkpoint.path} (batch {checkpoint.steps}{value})"

    def _reported(self, entry: Entry) -> str:
        trial, value = entry["trial"], math.nan if entry["value"] is None else entry["value"]
        is_best = better(value, self._best, self._searcher["smaller_is_better"])
        self._best = value if is_best else self._best
        mark = " (best)" if is_best else ""
        end = ", completed" if self._view.search.method.is_closed(trial) else ""
        at = _at(length_of(entry, self._searcher))
        return f"trial {trial}{at}: {self._searcher['metric']} {number(value)}{mark}{end}"

    def _ended(self, entry: Entry) -> str:
        trial, how = entry["trial"], Exit(entry["how"])
        failed = how in (Exit.FAILED, Exit.INVALID_HP)
        why = f": {why_not_completed(self._view.folder.trial(trial))}" if failed else ""
        return f"trial {trial} ended: {how.value}{why}"


def _invalid(counts: TrialCounts) -> list[str]:
    return [f"{counts.invalid} invalid"] if counts.invalid else []


def _in_words(best: BestTrial) -> str:
    return f"{best.metric} {number(best.value)} of trial {best.trial}{_at(best.length)}"


def _at(length: Length | None) -> str:
    return f" at {length_in_words(*length)}" if length else ""


class Tail:
    """A file of which each call returns the new lines. It may be created later, and may be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def lines(self) -> Iterator[str]:
        """Yield the new complete lines without their newline."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            self._continue(os.fstat(file.fileno()))
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # still being written; the next call reads it again
                    return
                self._offset += len(line)
                yield line.removesuffix(b"\n").decode(errors="replace")

    def _continue(self, found: os.stat_result) -> None:
        """Start from the beginning if the file is another one, or shorter than what was read."""
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset = found.st_ino, 0
