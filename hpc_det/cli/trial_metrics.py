"""hpc-det trial describe --metrics: every report of a trial."""

from __future__ import annotations

from hpc_det.cli.output import Column, Record, column
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.view.formatting import iso, values_in_words

KEYS = "time attempt kind batches metrics"
"""Of a record."""
COLUMNS = (
    column("TIME", "time"),
    column("ATTEMPT", "attempt"),
    column("KIND", "kind"),
    column("BATCHES", "batches"),
    Column("METRICS", lambda record: values_in_words(record["metrics"])),
)


def reported(trial: TrialFolder) -> list[Record]:
    """Oldest first, without what was lost and trained again."""
    return [
        {
            "time": iso(report["time"]),
            "attempt": report["attempt"],
            "kind": report["kind"],
            "batches": report["steps"],
            "metrics": report["metrics"],
        }
        for report in read_reports(trial.metrics)
    ]
