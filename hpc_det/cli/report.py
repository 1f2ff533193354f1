"""hpc-det report: an experiment as one page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.output import write_file
from hpc_det.report.facts import facts
from hpc_det.report.page import page
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.formatting import size
from hpc_det.view.state import ExperimentView
from hpc_det.view.watch import state


@click.command()
@any_experiment_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Output file; default: report-ID.html."
)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON, for programs; write no page.")
def report(experiment: ExperimentFolder, output: Path | None, as_json: bool) -> None:
    """Write a report of an experiment as one HTML page.

    It shows learning curves, the effect of hyperparameters, the rungs of a search, the history of all attempts with the
    goodput of their slots, and the configuration with secrets masked. It needs no server and no network: open the file
    in a browser, or send it to someone. For a running experiment it shows the data up to now.

    \b
    Example:
      hpc-det report 12 -o report.html
      hpc-det report 12 --json
      {"id": 12, "name": "digits", "state": "COMPLETED", "goodput": 0.81,
       "best": {"trial": 7, "metric": "accuracy", "value": 0.97, ...},
       "seconds": {...},
       "trials": [{"id": 1, "spans": [...], "validation": {...}, ...}],
       "brackets": [...], "importance": {...}, "config": [...], ...}
    `seconds` are the sums over all trials, by phase. Times are seconds since the epoch. Curves are lists of
    [batches, value]; a value that is not finite is null. A curve of more than 10,000 points is split into equal
    parts, and only the lowest and the highest point of each part are kept.
    """
    view = ExperimentView(experiment)
    found = facts(view, state(view), time.time())
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        click.echo(_written(output or Path(f"report-{experiment.id}.html"), found))


def _written(path: Path, found: dict[str, object]) -> str:
    """Write the page and return a sentence with its path and size; raise UsageError if it cannot be written."""
    text = page(found)
    write_file(path, text)
    return f"Wrote {path} ({size(len(text.encode()))})"
