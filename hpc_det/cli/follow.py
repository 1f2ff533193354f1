"""--follow: the training of an experiment, live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from hpc_det.cli import story
from hpc_det.cli.follow_many import summary_of_many, watch_many
from hpc_det.cli.state import ExperimentState, ExperimentView
from hpc_det.cli.story import Metrics
from hpc_det.cli.tail import Tail
from hpc_det.cli.values import number, values_in_words
from hpc_det.cli.watch import POLL_S, Watch, insist_on_completion
from hpc_det.config.merge import Tree
from hpc_det.store.files import parse_line
from hpc_det.store.folders import ExperimentFolder, TrialFolder

Record: TypeAlias = dict[str, Any]
"""A line of metrics.jsonl."""


class Display(Protocol):
    def update(self, state: ExperimentState, metrics: Metrics, news: list[Record]) -> None:
        """Called at every look at the files; `news` are the records that `metrics` did not hold before."""


def follow(experiment: ExperimentFolder) -> None:
    """Show the training until it ends, then what came of it. Raises HpcDetError unless it is COMPLETED."""
    began = time.monotonic()
    watch = Watch(experiment)
    try:
        state = watch_many(watch) if watch.view.has_many_trials else _watch(watch)
    except KeyboardInterrupt:
        click.echo(
            f"\nStopped following; experiment {experiment.id} goes on.\n"
            f"Follow it: hpc-det experiment logs {experiment.id} -f\n"
            f"End it:    hpc-det experiment kill {experiment.id}"
        )
        raise
    summarized = summary_of_many if watch.view.has_many_trials else summary
    for line in summarized(watch.view, state, time.monotonic() - began):
        click.echo(line)
    insist_on_completion(watch.view, state)
    click.echo(f"Next: hpc-det experiment describe {experiment.id}")


def summary(view: ExperimentView, state: ExperimentState, seconds: float) -> Iterator[str]:
    """What came of it: the state, the best validation and its checkpoint."""
    trial = view.folder.trial()
    metrics = Metrics.read(trial, view.config["searcher"])
    yield f"Experiment {view.id}: {state.value} after {metrics.batches} batches in {seconds:.0f} s"
    if best := metrics.best:
        yield f"Best validation: {best.metric} {number(best.value)} at batch {best.batches}"
    if checkpoint := story.checkpoint_to_take(trial, metrics.best):
        yield f"Checkpoint: {checkpoint.path} (batch {checkpoint.steps})"


def _watch(watch: Watch) -> ExperimentState:
    reader = MetricsReader(watch.view.folder.trial(), watch.view.config["searcher"])
    with _display(watch.view.id) as display:
        while True:
            state = watch.state()
            news = reader.read()
            display.update(state, reader.metrics, news)
            if state.is_final:
                return state
            time.sleep(POLL_S)


class MetricsReader:
    """The metrics so far, read on where the last look ended."""

    def __init__(self, trial: TrialFolder, searcher: Tree) -> None:
        self._searcher = searcher
        self._tail = Tail(trial.metrics)
        self._generation = 0
        self._seen: set[tuple[str, int, int]] = set()
        self.metrics = Metrics(searcher)

    def read(self) -> list[Record]:
        """The records that are new since the last call."""
        records = [record for line in self._tail.lines() if (record := parse_line(line))]
        if self._tail.generation != self._generation:  # a new attempt forgets what a lost stretch had reported
            self._generation, self.metrics = self._tail.generation, Metrics(self._searcher)
        self.metrics.take(records)
        keyed = {(record["kind"], record["attempt"], record["steps"]): record for record in records}
        news = [record for key, record in keyed.items() if key not in self._seen]
        self._seen |= keyed.keys()
        return news


@contextmanager
def _display(experiment_id: int) -> Iterator[Display]:
    console = Console()
    if not console.is_terminal:
        yield Lines(experiment_id)
        return
    bar = Bar(experiment_id)
    with Live(console=console, get_renderable=bar.rendered, auto_refresh=False) as live:
        bar.refresh = live.refresh
        yield bar


class Lines:
    """One line for each change of the state and each validation."""

    def __init__(self, experiment_id: int) -> None:
        self._id = experiment_id
        self._state: ExperimentState | None = None
        self._training: Mapping[str, float | str] = {}

    def update(self, state: ExperimentState, metrics: Metrics, news: list[Record]) -> None:
        if not state.is_final:
            self._tell(state)
        for record in news:
            if record["kind"] == "training":
                self._training = record["metrics"]
            else:
                click.echo(f"batch {record['steps']} of {record['total']}: {_last(self._training, record['metrics'])}")
        self._tell(state)

    def _tell(self, state: ExperimentState) -> None:
        if state is not self._state:
            self._state = state
            click.echo(f"experiment {self._id}: {state.value}")


class Bar:
    """A progress bar with the last metrics below."""

    def __init__(self, experiment_id: int) -> None:
        self.refresh: Callable[[], None] = lambda: None
        self._id = experiment_id
        self._metrics = Text()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
        )
        self._task = self._progress.add_task(f"experiment {experiment_id}", total=None)

    def update(self, state: ExperimentState, metrics: Metrics, news: list[Record]) -> None:
        description = f"experiment {self._id} {state.value}"
        self._progress.update(self._task, description=description, completed=metrics.batches, total=metrics.total)
        self._metrics = Text(_last(metrics.training, metrics.validation), no_wrap=True, overflow="ellipsis")
        self.refresh()

    def rendered(self) -> Group:
        return Group(self._progress, self._metrics)


def _last(training: Mapping[str, float | str], validation: Mapping[str, float | str]) -> str:
    shown = {"training": training, "validation": validation}
    return "   ".join(f"{kind}: {values_in_words(metrics)}" for kind, metrics in shown.items() if metrics)
