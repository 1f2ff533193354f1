"""The reports in metrics.jsonl of a trial: append-only lines, written by rank 0.

{"kind": "begins", "attempt": 3, "trained": 120, "validated": 100, "time": ...}
{"kind": "training", "steps": 130, "total": 400, "metrics": {"loss": 0.5}, "samples_per_second": 7.5, "attempt": 3, ...}
{"kind": "validation", "steps": 200, "total": 400, "metrics": {"accuracy": 0.9}, "seconds": 1.5, "attempt": 3, ...}

An attempt begins its training from a checkpoint. What earlier attempts reported after the batches of this checkpoint is
lost work, which is done again: such reports are void. Their lines stay in the file, and readers skip them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any

from hpc_det.errors import HpcDetError, shown
from hpc_det.node.json_files import NUMBER, Moment, Shape, blocks, each_line, insist_on, newest_first, parse_line

Record = dict[str, Any]
BEGINS = "begins"
_TRAINING = b'{"kind": "training"'
_WRITTEN: Shape = {"attempt": int, "time": Moment}
"""The keys of all lines in the file, besides those of their kind."""
_SHAPES: dict[str, Shape] = {
    BEGINS: {"trained": NUMBER, "validated": NUMBER},
    "training": {"steps": int, "metrics": dict},
    "validation": {"steps": int, "metrics": dict},
}
_OPTIONAL: Shape = {"seconds": (NUMBER, NoneType), "samples_per_second": NUMBER}


def checked(record: Record) -> Record:
    """Return the line unchanged. Raises HpcDetError if it does not have the structure of a report."""
    shape = _SHAPES.get(str(record.get("kind")))
    if shape is None:
        raise HpcDetError(f"metrics.jsonl: damaged: unknown kind of report in {shown(record)}; remove that line")
    insist_on(shape, record, "metrics.jsonl")
    insist_on({key: _OPTIONAL[key] for key in _OPTIONAL.keys() & record.keys()}, record, "metrics.jsonl")
    return record


def each(path: Path) -> Iterator[Record]:
    """Yield all lines, also void ones, oldest first. Raises HpcDetError for a damaged line."""
    for line in each_line(path):
        insist_on(_WRITTEN, checked(line), path)
        yield line


def standing(newest_first: Iterable[Record]) -> Iterator[Record]:
    """Yield the reports that no later attempt has made void, newest first. `newest_first`: all lines."""
    # The attempts whose beginning was read so far are later than the lines that follow. Each began from a checkpoint;
    # the lowest numbers of batches in these checkpoints, by kind, are the limits of reports that are not void.
    reached = {"training": math.inf, "validation": math.inf}
    for record in newest_first:
        if checked(record)["kind"] == BEGINS:
            reached["training"] = min(reached["training"], record["trained"])
            reached["validation"] = min(reached["validation"], record["validated"])
        elif record["steps"] <= reached[record["kind"]]:
            yield record


def reports_of(lines: Iterable[Record]) -> list[Record]:
    """Return the valid reports among `lines`; both are oldest first."""
    return list(standing(reversed(list(lines))))[::-1]


def read_reports(path: Path) -> list[Record]:
    """Return the valid reports in the file, oldest first; an empty list if it does not exist."""
    return reports_of(each_line(path))


def last_reports(path: Path) -> dict[str, Record]:
    """Return the last valid report of each kind, the newest first; reads from the end of the file."""
    found: dict[str, Record] = {}

    def parsed() -> Iterator[Record]:
        for line in newest_first(path):
            # There are many reports of training: once the last is found, skip the others without parsing them
            is_known = "training" in found and line.startswith(_TRAINING)
            if not is_known and (record := parse_line(line, path)):
                yield record

    for report in standing(parsed()):
        found.setdefault(report["kind"], report)
        if len(found) == 2:
            break
    return found


def samples_per_second(path: Path) -> list[float]:
    """Return the throughput of all ranks together in each valid report of training, oldest first."""
    return [report["samples_per_second"] for report in read_reports(path) if report["kind"] == "training"]


def validation_metrics(path: Path, at: Collection[int]) -> dict[int, Record]:
    """Return batches -> validation metrics, for the batches `at`."""
    found: dict[int, Record] = {}
    for block in blocks(path):
        for line in _VALIDATED_OR_BEGUN.findall(block):
            if record := parse_line(line, path):
                _take(found, checked(record), record.get("metrics"), is_wanted=record.get("steps") in at)
    return found


def validations(path: Path, metric: str) -> dict[int, float]:
    """Return batches -> value of `metric`, for each validation at which it was a number."""
    # Listings of experiments read many long files, so lines of the usual form are not parsed as JSON. A million lines,
    # of which a tenth are validations, take 0.2 s instead of 3 s.
    usual, values = _with_number(metric), dict[int, float]()
    for block in blocks(path):
        numbers = usual.findall(block)
        if b'"begins"' not in block and len(numbers) == block.count(b'"validation"'):
            values.update((int(steps), float(value)) for steps, value in numbers)
        else:  # an attempt begins, which makes lines void, or a validation has another form
            _take_all(values, block, metric, path)
    return values


_VALIDATED_OR_BEGUN = re.compile(rb'^[^\n]*"(?:validation|begins)"[^\n]*$', re.MULTILINE)


def _with_number(metric: str) -> re.Pattern[bytes]:
    """Return a pattern for validations as rank 0 writes them, with the numbers of batches and `metric` as groups.

    It matches if `metric` is a number, and no metric before it is a list or map.
    """
    name = re.escape(json.dumps(metric).encode())
    head = rb'\{"kind": "validation", "steps": (\d+), "total": \w+, "metrics": \{(?:[^{}\[\n]*, )?'
    return re.compile(head + name + rb": (-?\d[\d.eE+-]*)[,}]")  # begins with a literal: four times as fast as ^


def _take_all(values: dict[int, float], block: bytes, metric: str, path: Path) -> None:
    for line in _VALIDATED_OR_BEGUN.findall(block):
        if record := parse_line(line, path):
            value = number_in(checked(record).get("metrics", {}).get(metric))
            _take(values, record, value, is_wanted=value is not None)


def _take(values: dict[int, Any], record: Record, value: Any, *, is_wanted: bool) -> None:
    """Update `values`, which are keyed by batches, with one line. `is_wanted`: a validation's `value` is added."""
    if record["kind"] == BEGINS:
        for steps in [steps for steps in values if steps > record["validated"]]:
            del values[steps]
    elif record["kind"] == "validation":
        values.pop(record["steps"], None)  # a later validation at the same batch replaces the earlier one
        if is_wanted:
            values[record["steps"]] = value


def number_in(value: Any) -> float | None:
    """Return a metric of the file as a float; None if it is not a number."""
    # JSON has no NaN and infinities: `as_written` makes them strings
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def as_written(value: float) -> float | str:
    """Return a metric for the file: the inverse of `number_in`."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def numbers_in(result: Mapping[str, Any], *, but: Collection[str] = ()) -> dict[str, float | str]:
    """Return the numbers of a result, also those of numpy, as metrics for the file, except the keys `but`."""
    return {
        str(name): as_written(float(value))
        for name, value in result.items()
        if isinstance(value, Real) and not isinstance(value, bool) and name not in but
    }


def in_json(value: Any) -> Any:
    """Return `value` as JSON can represent it.

    Numbers of numpy and tensors with one value become numbers, infinities and NaN become null, other objects strings.
    """
    if isinstance(value, dict):
        return {str(name): in_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(inner) for inner in value]
    if isinstance(value, float):  # also numpy.float64, a subclass: float() makes it a plain number
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (str, bool, int, type(None))):
        return value
    try:
        return in_json(value.item())
    except Exception:
        return str(value)


def number_or_nan(value: Any) -> float:
    """Return `value` as a float; NaN, the worst value of a metric, if it is not a number."""
    return float(value) if isinstance(value, (int, float)) else math.nan
