"""hpc-det experiment list-checkpoints, and trial list-checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import click

from hpc_det.cli.arguments import any_experiment_argument
from hpc_det.cli.output import Column, Output, Record, output_options
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.checkpoints import StoredCheckpoint, best_first, of_experiment, set_aside_in
from hpc_det.view.formatting import NONE, iso, number, size
from hpc_det.view.state import effective_config

best_option = click.option(
    "--best", type=click.IntRange(min=1), metavar="N", help="Only the best N, by the searcher's metric."
)


@click.command("list-checkpoints")
@any_experiment_argument
@best_option
@output_options
def list_checkpoints(experiment: ExperimentFolder, best: int | None, output: Output) -> None:
    """List the checkpoints of an experiment.

    The state is COMPLETED, PARTIALLY_DELETED (by `checkpoint rm --glob`), DAMAGED (files are missing or truncated) or
    SET_ASIDE: it was damaged when a trial tried to resume from it, and is no longer used; see `trial describe`.

    \b
    Example:
      hpc-det experiment list-checkpoints 12 --best 3
    """
    config = effective_config(experiment)
    set_aside = [found for trial in experiment.trials() for found in set_aside_in(trial, config)]
    show_checkpoints(of_experiment(experiment, config), set_aside, config["searcher"], best, output)


def show_checkpoints(
    found: Sequence[StoredCheckpoint],
    set_aside: Sequence[StoredCheckpoint],
    searcher: Record,
    best: int | None,
    output: Output,
) -> None:
    """Print the checkpoints; with `best`, only that number of them, best first by the searcher's metric."""
    metric = searcher["metric"]
    if best is not None:
        found, set_aside = best_first(found, metric, smaller_is_better=searcher["smaller_is_better"])[:best], []
    output.table([_record(item, metric) for item in (*found, *set_aside)], COLUMNS, KEYS)


def _record(item: StoredCheckpoint, metric: str) -> dict[str, Any]:
    return {
        "trial": item.trial.id,
        "batches": item.checkpoint.steps,
        "state": item.state,
        "metric": metric,
        "value": item.metrics.get(metric),
        "uuid": item.uuid,
        "size_bytes": item.checkpoint.size_bytes,
        "time": iso(item.checkpoint.time),
    }


def _validation(record: Record) -> str:
    return NONE if record["value"] is None else f"{record['metric']} {number(record['value'])}"


KEYS = "trial batches state metric value uuid size_bytes time"  # of a record
COLUMNS = (
    Column("TRIAL", lambda record: str(record["trial"])),
    Column("BATCHES", lambda record: str(record["batches"])),
    Column("STATE", itemgetter("state")),
    Column("VALIDATION", _validation),
    Column("UUID", itemgetter("uuid")),
    Column("SIZE", lambda record: size(record["size_bytes"])),
)
