"""hpc-det experiment list."""

from __future__ import annotations

import time
from datetime import datetime
from operator import itemgetter

from hpc_det.cli.output import Column, Record
from hpc_det.store.experiments import ExperimentStore
from hpc_det.view.all import summaries
from hpc_det.view.formatting import NONE, clock, iso, number, percent, reached
from hpc_det.view.summary import Summary


def listed(store: ExperimentStore) -> list[Record]:
    """One record for each experiment, as `list --json` prints it."""
    return [_record(each) for each in summaries(store)]


def _record(found: Summary) -> Record:
    submitted = iso(found.submitted) if found.submitted else None
    return {**{key: getattr(found, key) for key in KEYS.split()}, "state": found.state.value, "submitted": submitted}


def _best(record: Record) -> str:
    best, trials = record["best"], record["trials"]
    whose = f" (trial {best['trial']})" if best and trials["expected"] > 1 else ""
    return f"{best['metric']} {number(best['value'])}{whose}" if best else NONE


def progress_in_words(record: Record) -> str:
    if record["batches"] is not None:
        return f"{reached(record)} batches"
    return reached(record) + (f", {percent(record['progress'])}" if record["trials"] else "")


def _when(submitted: str | None) -> str:
    return clock(datetime.fromisoformat(submitted).timestamp(), time.time()) if submitted else NONE


KEYS = "id name description labels archived state batches total_batches best trials progress submitted"
"""Of a record."""
COLUMNS = (
    Column("ID", lambda record: str(record["id"])),
    Column("NAME", itemgetter("name")),
    Column("STATE", itemgetter("state")),
    Column("PROGRESS", progress_in_words),
    Column("BEST", _best),
    Column("SUBMITTED", lambda record: _when(record["submitted"])),
)
