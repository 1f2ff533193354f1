"""hpc-det experiment list."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from hpc_det.cli import state as experiment_state
from hpc_det.cli import story
from hpc_det.cli.state import ExperimentState
from hpc_det.cli.story import Metrics, Validation
from hpc_det.cli.watch import states
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.folders import ExperimentFolder

LONGEST_VALUE = 60
"""Characters of a metric that is no number."""
DAMAGED = "(files damaged)"
HEADINGS = ("ID", "NAME", "STATE", "BATCHES", "BEST", "SUBMITTED")


def listed(experiments: Sequence[ExperimentFolder]) -> list[dict[str, Any]]:
    """One record for each experiment, as `list --json` prints it."""
    found = states(experiments)
    return [_record(experiment, found[experiment.id]) for experiment in experiments]


def _record(experiment: ExperimentFolder, state: ExperimentState) -> dict[str, Any]:
    trial = experiment.trial()
    try:
        name = JobPlan.from_json(experiment.plan.read_text(encoding="utf-8")).name
        metrics = Metrics.read(trial)
    except (OSError, ValueError, KeyError, TypeError):  # one torn file must not hide all other experiments
        name, metrics = DAMAGED, Metrics("", smaller_is_better=True)
    submitted = experiment_state.jobs(experiment)
    return {
        "id": experiment.id,
        "name": name,
        "state": state.value,
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "best": as_json(metrics.best),
        "submitted": iso(submitted[0].submitted) if submitted else None,
    }


def as_json(best: Validation | None) -> dict[str, Any] | None:
    return asdict(best) if best else None


def iso(moment: float) -> str:
    """Local time with its offset, to the second."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


def table(records: Sequence[dict[str, Any]]) -> str:
    rows = [HEADINGS, *map(_row, records)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    best = record["best"]
    return (
        str(record["id"]),
        record["name"],
        record["state"],
        f"{record['batches']}/{record['total_batches'] or '?'}",
        f"{best['metric']} {number(best['value'])}" if best else "-",
        _when(record["submitted"]),
    )


def number(value: Any) -> str:
    """A metric as people read it; what is no number, such as a matrix, as JSON, and its beginning only."""
    if isinstance(value, (int, float)):
        return f"{value:.5g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def values_in_words(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in metrics.items())


def _when(submitted: str | None) -> str:
    return story.clock(datetime.fromisoformat(submitted).timestamp(), time.time()) if submitted else "-"
