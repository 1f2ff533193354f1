"""hpc-det report: an experiment as one page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.errors import UsageError
from hpc_det.node.files import write_atomic
from hpc_det.report.facts import facts
from hpc_det.report.page import page
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import size
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import state


@click.command()
@any_experiment_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="By default report-ID.html here.")
@click.option("--json", "as_json", is_flag=True, help="For programs: print the facts, and write no page.")
def report(experiment: ExperimentFolder, output: Path | None, as_json: bool) -> None:
    """Write an experiment as one HTML page.

    It shows learning curves, what hyperparameters do, the rungs of a search, the story of all attempts with the goodput
    of their slots, and the configuration, with secrets masked. It needs no server and no network: open the file in a
    browser, or send it to somebody. Of an experiment that runs it shows what there is now.

    \b
    Example:
      hpc-det report 12 -o report.html
      hpc-det report 12 --json
      {"id": 12, "name": "digits", "state": "COMPLETED", "goodput": 0.81,
       "best": {"trial": 7, "metric": "accuracy", "value": 0.97, ...},
       "seconds": {...},
       "trials": [{"id": 1, "spans": [...], "validation": {...}, ...}],
       "brackets": [...], "importance": {...}, "config": [...], ...}
    `seconds` are of all trials, by phase. Moments are seconds since the epoch. Curves are lists of [batches, value];
    null is a value that is not a finite number. A curve of more than 10,000 points keeps the lowest and the highest
    of equal parts.
    """
    view = ExperimentView(experiment)
    found = facts(view, state(view), time.time())
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(_written(output or Path(f"report-{experiment.id}.html"), found))


def _written(path: Path, found: dict[str, object]) -> str:
    text = page(found)
    try:
        write_atomic(path, text)
    except OSError as error:
        raise UsageError(f"--output: {path}: {error.strerror}; name a file in a folder that you may write to") from None
    return f"Wrote {path} ({size(len(text.encode()))})"
