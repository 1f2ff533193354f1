"""hpc-det experiment list: experiments with their state, progress and best metric."""

from __future__ import annotations

import time
from datetime import datetime
from operator import itemgetter

import click

from hpc_det.cli.output import Column, Output, Record, output_options
from hpc_det.client.lookup import selected, store
from hpc_det.view.formatting import NONE, clock, iso, number, percent, reached
from hpc_det.view.state import ExperimentState
from hpc_det.view.summary import Summary

_STATES = [state.value for state in ExperimentState]


@click.command("list")
@click.option("--of", "owner", metavar="OWNER", help="List what a colleague shares: a user name or HPC_DET_ROOT.")
@click.option("-a", "--all", "with_archived", is_flag=True, help="Include archived experiments.")
@click.option("--state", "wanted", multiple=True, type=click.Choice(_STATES), help="Only this state; repeatable.")
@click.option("--label", "labels", multiple=True, metavar="LABEL", help="Only with this label; repeatable.")
@output_options
def list_(
    owner: str | None, with_archived: bool, wanted: tuple[str, ...], labels: tuple[str, ...], output: Output
) -> None:
    """List experiments.

    The state is SUBMITTING, QUEUED, RUNNING, SUSPENDED, PAUSED, COMPLETED,
    ERROR or CANCELED.

    \b
    Example:
      hpc-det experiment list --json
      [{"id": 12, "name": "digits", "description": "",
        "labels": ["baseline"], "archived": false, "state": "RUNNING",
        "batches": 200, "total_batches": 460,
        "best": {"metric": "accuracy", "value": 0.97,
                 "batches": 180, "trial": 1},
        "trials": {"expected": 1, "created": 1, "running": 1,
                   "completed": 0, "failed": 0, "invalid": 0},
        "progress": 0.43, "phase": null,
        "submitted": "2026-11-20T10:02:05+01:00"}]
    `total_batches` and `best` are null before the first report. If there are
    several trials, `batches` and `total_batches` are null, and `best` is
    determined by the metrics reported to the search. `phase` is what a single
    trial does before it trains: "startup hook", "compiling DeepSpeed ops" or
    null. A metric is a number or one of "NaN", "Infinity", "-Infinity".
    """
    found = selected(store(owner), states=wanted, labels=labels, with_archived=with_archived)
    output.table([_record(each) for each in found], COLUMNS, KEYS)


def _record(found: Summary) -> Record:
    submitted = iso(found.submitted) if found.submitted else None
    return {
        **{key: getattr(found, key) for key in KEYS.split()},
        "state": found.state.value,
        "submitted": submitted,
    }


def _best(record: Record) -> str:
    best, trials = record["best"], record["trials"]
    whose = f" (trial {best['trial']})" if best and trials["expected"] > 1 else ""
    return f"{best['metric']} {number(best['value'])}{whose}" if best else NONE


def progress_in_words(record: Record) -> str:
    """Return the progress: batches of a single trial, or trials and percent of a search."""
    if record["batches"] is not None:
        return reached(record) if record.get("phase") else f"{reached(record)} batches"
    return reached(record) + (f", {percent(record['progress'])}" if record["trials"] else "")


def _when(submitted: str | None) -> str:
    return clock(datetime.fromisoformat(submitted).timestamp(), time.time()) if submitted else NONE


# the keys of a record
KEYS = "id name description labels archived state batches total_batches best trials progress phase submitted"
COLUMNS = (
    Column("ID", lambda record: str(record["id"])),
    Column("NAME", itemgetter("name")),
    Column("STATE", itemgetter("state")),
    Column("PROGRESS", progress_in_words),
    Column("BEST", _best),
    Column("SUBMITTED", lambda record: _when(record["submitted"])),
)
