"""What metrics.jsonl of a trial says: append-only lines, written by rank 0.

{"kind": "begins", "attempt": 3, "trained": 120, "validated": 100, "time": ...}
{"kind": "training", "steps": 130, "total": 400, "metrics": {"loss": 0.5}, "samples_per_second": 7.5, "attempt": 3, ...}
{"kind": "validation", "steps": 200, "total": 400, "metrics": {"accuracy": 0.9}, "seconds": 1.5, "attempt": 3, ...}

The training of an attempt begins with a checkpoint. What earlier attempts reported beyond it is lost work, and is done
again: those lines are void, and stay.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

from hpc_det.errors import HpcDetError, shown
from hpc_det.node.json_files import NUMBER, Moment, Shape, blocks, each_line, insist_on, newest_first, parse_line

Record = dict[str, Any]
BEGINS = "begins"
_TRAINING = b'{"kind": "training"'
_WRITTEN: Shape = {"attempt": int, "time": Moment}
"""What every line has beside that."""
_SHAPES: dict[str, Shape] = {
    BEGINS: {"trained": NUMBER, "validated": NUMBER},
    "training": {"steps": int, "metrics": dict},
    "validation": {"steps": int, "metrics": dict},
}
_OPTIONAL: Shape = {"seconds": (NUMBER, NoneType), "samples_per_second": NUMBER}


def checked(record: Record) -> Record:
    """The line as it is. Raises HpcDetError for one that no rank 0 has written."""
    shape = _SHAPES.get(str(record.get("kind")))
    if shape is None:
        raise HpcDetError(f"metrics.jsonl: damaged: no kind of report in the line {shown(record)}; remove that line")
    insist_on(shape, record, "metrics.jsonl")
    insist_on({key: _OPTIONAL[key] for key in _OPTIONAL.keys() & record.keys()}, record, "metrics.jsonl")
    return record


def each(path: Path) -> Iterator[Record]:
    """All lines, also void ones, oldest first. Raises HpcDetError for a damaged one."""
    for line in each_line(path):
        insist_on(_WRITTEN, checked(line), path)
        yield line


def standing(newest_first: Iterable[Record]) -> Iterator[Record]:
    """The reports that no later attempt has made void, of all lines from the newest to the oldest, in that order."""
    reached = {"training": math.inf, "validation": math.inf}
    for record in newest_first:
        if checked(record)["kind"] == BEGINS:
            reached["training"] = min(reached["training"], record["trained"])
            reached["validation"] = min(reached["validation"], record["validated"])
        elif record["steps"] <= reached[record["kind"]]:
            yield record


def reports_of(lines: Iterable[Record]) -> list[Record]:
    """The reports that stand, of all lines, both oldest first."""
    return list(standing(reversed(list(lines))))[::-1]


def read_reports(path: Path) -> list[Record]:
    """The reports that stand, oldest first; none where there is no such file."""
    return reports_of(each_line(path))


def last_reports(path: Path) -> dict[str, Record]:
    """The last report that stands of each kind, the newest first; read from the end of the file."""
    found: dict[str, Record] = {}

    def parsed() -> Iterator[Record]:
        for line in newest_first(path):
            is_known = "training" in found and line.startswith(_TRAINING)
            if not is_known and (record := parse_line(line)):
                yield record

    for report in standing(parsed()):
        found.setdefault(report["kind"], report)
        if len(found) == 2:
            break
    return found


def samples_per_second(path: Path) -> list[float]:
    """Of all ranks together, in each report of training that stands, oldest first."""
    return [report["samples_per_second"] for report in read_reports(path) if report["kind"] == "training"]


def validation_metrics(path: Path, at: Collection[int]) -> dict[int, Record]:
    """Batches -> what was validated there, of the batches `at`."""
    found: dict[int, Record] = {}
    for block in blocks(path):
        for line in _VALIDATED_OR_BEGUN.findall(block):
            if record := parse_line(line):
                _take(found, checked(record), record.get("metrics"), is_wanted=record.get("steps") in at)
    return found


def validations(path: Path, metric: str) -> dict[int, float]:
    """Batches -> the value of `metric` at each validation where it was a number.

    A list of experiments reads this of many long files, so lines of the usual form are not parsed: a million lines, of
    which a tenth are validations, take 0.2 s instead of 3 s.
    """
    usual, values = _with_number(metric), dict[int, float]()
    for block in blocks(path):
        numbers = usual.findall(block)
        if b'"begins"' not in block and len(numbers) == block.count(b'"validation"'):
            values.update((int(steps), float(value)) for steps, value in numbers)
        else:
            _take_all(values, block, metric)
    return values


_VALIDATED_OR_BEGUN = re.compile(rb'^[^\n]*"(?:validation|begins)"[^\n]*$', re.MULTILINE)


def _with_number(metric: str) -> re.Pattern[bytes]:
    """A validation as rank 0 writes it, with no list or map among its metrics and a number as its `metric`."""
    name = re.escape(json.dumps(metric).encode())
    head = rb'\{"kind": "validation", "steps": (\d+), "total": \w+, "metrics": \{(?:[^{}\[\n]*, )?'
    return re.compile(head + name + rb": (-?\d[\d.eE+-]*)[,}]")  # a literal first: four times as fast as with ^


def _take_all(values: dict[int, float], block: bytes, metric: str) -> None:
    for line in _VALIDATED_OR_BEGUN.findall(block):
        if record := parse_line(line):
            value = number_in(checked(record).get("metrics", {}).get(metric))
            _take(values, record, value, is_wanted=value is not None)


def _take(values: dict[int, Any], record: Record, value: Any, *, is_wanted: bool) -> None:
    """Into `values`, by batches, what stands after this line."""
    if record["kind"] == BEGINS:
        for steps in [steps for steps in values if steps > record["validated"]]:
            del values[steps]
    elif record["kind"] == "validation":
        values.pop(record["steps"], None)
        if is_wanted:
            values[record["steps"]] = value


def number_in(value: Any) -> float | None:
    """A metric as the file holds it: NaN and the infinities are words there. None for what is no number."""
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def as_written(value: float) -> float | str:
    """The inverse of `number_in`."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def in_json(value: Any) -> Any:
    """Numbers of numpy and tensors of one value become plain ones, what is not finite null, what JSON has not text."""
    if isinstance(value, dict):
        return {str(name): in_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(inner) for inner in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (str, bool, int, type(None))):
        return value
    try:
        return in_json(value.item())
    except Exception:
        return str(value)


def number_or_nan(value: Any) -> float:
    """NaN for what is none: the worst value of a metric."""
    return float(value) if isinstance(value, (int, float)) else math.nan
