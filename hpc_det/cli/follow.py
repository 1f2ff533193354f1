"""--follow: the training of an experiment, live on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import click
from rich.console import Console, RenderableType
from rich.live import Live

from hpc_det.cli.follow_many import ManyTrials
from hpc_det.cli.follow_one import OneTrial
from hpc_det.cli.output import show
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentState
from hpc_det.view.watch import POLL_S, Watch, insist_on_completion


class Training(Protocol):
    """An experiment under way; either `news` or `bar` is asked, at every look at the files."""

    def news(self) -> Iterator[str]:
        """A line for each thing that has happened since the last call."""

    def bar(self, state: ExperimentState) -> RenderableType:
        """How far it is."""

    def summary(self, state: ExperimentState, seconds: float) -> Iterator[str]:
        """What came of it."""


def follow(experiment: ExperimentFolder) -> None:
    """Show the training until it ends, then what came of it. Raises HpcDetError unless it is COMPLETED."""
    began = time.monotonic()
    watch = Watch(experiment)
    training: Training = ManyTrials(watch.view) if watch.view.has_many_trials else OneTrial(watch.view)
    try:
        state = _watch(watch, training)
    except KeyboardInterrupt:
        click.echo(
            f"\nStopped following; experiment {experiment.id} goes on.\n"
            f"Follow it: hpc-det experiment logs {experiment.id} -f\n"
            f"End it:    hpc-det experiment kill {experiment.id}"
        )
        raise
    for line in training.summary(state, time.monotonic() - began):
        show(line)
    insist_on_completion(watch.view, state)
    click.echo(f"Next: hpc-det experiment describe {experiment.id}")


def _watch(watch: Watch, training: Training) -> ExperimentState:
    """Returns the final state."""
    with _display(watch.view.id, training) as display:
        while True:
            state = watch.state()
            display.update(state)
            if state.is_final:
                return state
            time.sleep(POLL_S)


class Display(Protocol):
    def update(self, state: ExperimentState) -> None: ...


@contextmanager
def _display(experiment_id: int, training: Training) -> Iterator[Display]:
    console = Console()
    if not console.is_terminal:
        yield Lines(experiment_id, training)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield Bar(live, training)


class Lines:
    """One line for each change of the state and each thing that happens."""

    def __init__(self, experiment_id: int, training: Training) -> None:
        self._id = experiment_id
        self._training = training
        self._state: ExperimentState | None = None

    def update(self, state: ExperimentState) -> None:
        if not state.is_final:
            self._tell(state)
        for line in self._training.news():
            show(line)
        self._tell(state)

    def _tell(self, state: ExperimentState) -> None:
        if state is not self._state:
            self._state = state
            click.echo(f"experiment {self._id}: {state.value}")


class Bar:
    def __init__(self, live: Live, training: Training) -> None:
        self._live = live
        self._training = training

    def update(self, state: ExperimentState) -> None:
        self._live.update(self._training.bar(state), refresh=True)
