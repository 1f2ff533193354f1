"""What metrics.jsonl of a trial says: append-only lines, written by rank 0.

{"kind": "begins", "attempt": 3, "trained": 120, "validated": 100, "time": ...}
{"kind": "training", "steps": 130, "total": 400, "metrics": {"loss": 0.5}, "samples_per_second": 7.5, "attempt": 3, ...}
{"kind": "validation", "steps": 200, "total": 400, "metrics": {"accuracy": 0.9}, "seconds": 1.5, "attempt": 3, ...}

The training of an attempt begins with a checkpoint. What earlier attempts reported beyond it is lost work, and is done
again: those lines are void, and stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError, shown
from hpc_det.store.files import NUMBER, Shape, insist_on, parse_line, read_lines

Record = dict[str, Any]
BEGINS = "begins"
_WRITTEN: Shape = {"attempt": int, "time": NUMBER}
"""What every line has beside that."""
_SHAPES: dict[str, Shape] = {
    BEGINS: {"trained": NUMBER, "validated": NUMBER},
    "training": {"steps": int, "metrics": dict},
    "validation": {"steps": int, "metrics": dict},
}


def checked(record: Record) -> Record:
    """The line as it is. Raises HpcDetError for one that no rank 0 has written."""
    shape = _SHAPES.get(str(record.get("kind")))
    if shape is None:
        raise HpcDetError(f"metrics.jsonl: damaged: no kind of report in the line {shown(record)}; remove that line")
    insist_on(shape, record, "metrics.jsonl")
    return record


def standing(newest_first: Iterable[Record]) -> Iterator[Record]:
    """The reports that no later attempt has made void, of all lines from the newest to the oldest, in that order."""
    reached = {"training": math.inf, "validation": math.inf}
    for record in newest_first:
        if checked(record)["kind"] == BEGINS:
            reached["training"] = min(reached["training"], record["trained"])
            reached["validation"] = min(reached["validation"], record["validated"])
        elif record["steps"] <= reached[record["kind"]]:
            yield record


def read_all(path: Path) -> list[Record]:
    """Every line, also of what was lost. Raises HpcDetError for a damaged one."""
    lines = [*map(checked, read_lines(path))]
    for line in lines:
        insist_on(_WRITTEN, line, path)
    return lines


def reports_of(lines: Iterable[Record]) -> list[Record]:
    """The reports that stand, of all lines, both oldest first."""
    return list(standing(reversed(list(lines))))[::-1]


def read_reports(path: Path) -> list[Record]:
    """The reports that stand, oldest first; none where there is no such file."""
    return reports_of(read_lines(path))


def samples_per_second(path: Path) -> list[float]:
    """Of all ranks together, in each report of training that stands, oldest first."""
    return [report["samples_per_second"] for report in read_reports(path) if report["kind"] == "training"]


def validation_metrics(path: Path) -> dict[int, Record]:
    """Batches -> what was validated there. Only the lines that this takes are parsed: the file may be long."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = (parse_line(line) for line in lines if b'"validation"' in line or b'"begins"' in line)
    standing = reports_of(record for record in records if record)
    return {record["steps"]: record["metrics"] for record in standing if record["kind"] == "validation"}


def validations(path: Path, metric: str) -> dict[int, float]:
    """Batches -> the value of `metric` at each validation where it was a number."""
    values = {steps: number_in(found.get(metric)) for steps, found in validation_metrics(path).items()}
    return {steps: value for steps, value in values.items() if value is not None}


def number_in(value: Any) -> float | None:
    """A metric as the file holds it: NaN and the infinities are words there. None for what is no number."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
