"""hpc-det report: one or several experiments as one page."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_det.cli.arguments import several_experiments_argument
from hpc_det.cli.output import write_file
from hpc_det.report.comparison import comparison
from hpc_det.report.facts import facts
from hpc_det.report.page import page
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import size
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import Watch
from hpc_det.view.watch import state as state_of

Record = dict[str, Any]
MOST_IN_NAME = 4
"""Largest number of IDs in the default name of the file."""
EVERY_S = 30.0
"""Seconds between two updates of a watched page."""


@click.command()
@several_experiments_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Output file; default: report-ID.html."
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON, for programs; write no page.")
@click.option("--watch", is_flag=True, help="Update the page until the experiments end; it reloads itself.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=1.0),
    metavar="SECONDS",
    help=f"With --watch: time between two updates; default: {EVERY_S:g}.",
)
def report(
    experiments: list[ExperimentFolder], output: Path | None, as_json: bool, watch: bool, every_s: float | None
) -> None:
    """Write a report of experiments as one HTML page.

    Of one experiment it shows learning curves, the effect of hyperparameters, the rungs of a search, the history of all
    attempts with the goodput of their slots, and the configuration with secrets masked. Several experiments are
    compared: results, curves over each other, and the hyperparameters and settings that differ. The page needs no
    server and no network: open the file in a browser, or send it to someone. For a running experiment it shows the data
    up to now.

    \b
    Example:
      hpc-det report 12 -o report.html
      hpc-det report 12 --watch
      hpc-det report 12 15
      hpc-det report 12 --json
      {"id": 12, "name": "digits", "state": "COMPLETED", "goodput": 0.81,
       "best": {"trial": 7, "metric": "accuracy", "value": 0.97, ...},
       "seconds": {...},
       "trials": [{"id": 1, "spans": [...], "validation": {...}, ...}],
       "brackets": [...], "importance": {...}, "config": [...], ...}
    `seconds` are the sums over all trials, by phase. Times are seconds since the epoch. Curves are lists of
    [batches, value]; a value that is not finite is null. A curve of more than 10,000 points is split into equal
    parts, and only the lowest and the highest point of each part are kept. The facts of several experiments are a
    list.
    """
    if watch and as_json:
        raise click.UsageError("--watch: conflicts with --json; give one of them")
    if every_s and not watch:
        raise click.UsageError("--every: has no effect without --watch; add it")
    path = output or Path(_file_name(experiments))
    if watch:
        _watch(experiments, path, every_s or EVERY_S)
        return
    views = [ExperimentView(experiment) for experiment in experiments]
    found = _facts(views, [*map(state_of, views)])
    if as_json:
        click.echo(json.dumps(found[0] if len(found) == 1 else found, indent=1))
    else:
        click.echo(_written(path, found))


def _file_name(experiments: Sequence[ExperimentFolder]) -> str:
    numbers = [str(experiment.id) for experiment in experiments]
    more = [f"and-{len(numbers) - MOST_IN_NAME}-more"] if len(numbers) > MOST_IN_NAME else []
    return f"report-{'-'.join(numbers[:MOST_IN_NAME] + more)}.html"


def _facts(views: Sequence[ExperimentView], found: Sequence[ExperimentState]) -> list[Record]:
    now = time.time()
    return [facts(view, state, now) for view, state in zip(views, found, strict=True)]


def _watch(experiments: Sequence[ExperimentFolder], path: Path, every_s: float) -> None:
    """Write the page again and again until all experiments have ended, or until Ctrl-C."""
    watches = [Watch(experiment) for experiment in experiments]
    found: list[Record] = []
    was_said = False
    try:
        while True:
            now = [watch.state() for watch in watches]
            found = _facts([watch.view for watch in watches], now)
            if all(state.is_final for state in now):
                break
            said = _written(path, found, every_s)
            if not was_said:
                click.echo(f"{said}; updating it every {every_s:g} s until the end (Ctrl-C stops)")
                was_said = True
            time.sleep(every_s)
    finally:
        if found:  # after Ctrl-C, too: the page must not go on reloading a file that does not change
            click.echo(_written(path, found))


def _written(path: Path, found: Sequence[Record], refresh_s: float | None = None) -> str:
    """Write the page and return a sentence with its path and size; raise UsageError if it cannot be written."""
    text = page(found[0], refresh_s) if len(found) == 1 else comparison(found, refresh_s)
    write_file(path, text)
    return f"Wrote {path} ({size(len(text.encode()))})"
