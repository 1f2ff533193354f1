"""Compare two short trainings, one of which was stopped and resumed, to decide whether a resume is exact.

The comparison contains the first difference and what a resume has lost. hpc_det.view.resume_causes gives the causes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hpc_det.errors import HpcDetError, count
from hpc_det.node.json_files import read_counted, read_lines
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.store.trace_names import GLOBAL, UNSAVED, VARIABLE

TraceEntry: TypeAlias = dict[str, Any]
"""A line of a trace, which describes one batch; see `hpc_det.pytorch.state.resume_trace` for a trial class and
`hpc_det.core.resume_trace` for a loop of a script.
"""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value that is not the same in both trainings."""

    batch: int
    """Number of the batch, for its data, its metrics or the state before it; for a report, the number of batches
    trained.
    """
    part: str
    """`state`, `data`, `metrics`, or, for reports, `training` or `validation`."""
    name: str
    undisturbed: str | None
    """Value in the training that was not stopped, as text; None if only the other training has it."""
    stopped: str | None
    """Value in the stopped training, as text; None if only the other training has it."""
    rank: int | None = None
    """Number of the rank; None for a report, which covers all ranks."""

    @property
    def is_saved(self) -> bool:
        """False for state in no checkpoint: a difference of it alone does not make a resume inexact."""
        return not self.name.startswith(UNSAVED)


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two trainings."""

    batches: int
    """Number of batches that both have trained."""
    resumes: tuple[int, ...]
    """Numbers of batches from which the stopped training resumed."""
    first: tuple[Difference, ...]
    """All differences in the first part of the first batch that has any, not counting unsaved state."""
    lost: tuple[Difference, ...]
    """State in no checkpoint that was equal before a stop and differs after it."""
    unlike: tuple[Difference, ...]
    """State in no checkpoint that differed from the start."""
    is_script: bool = False
    """Whether a script has its own training loop, on hpc_det.core."""
    repeated: tuple[tuple[int, int], ...] = ()
    """Stops of a script that no checkpoint preceded: batches at the stop, and batches from which the trial resumed."""

    @property
    def is_identical(self) -> bool:
        return not self.first


def compare(undisturbed: TrialFolder, stopped: TrialFolder) -> Comparison:
    """Return the comparison of two trainings of the same trial.

    Raises HpcDetError if a training has no trace, as of a script that uses neither hpc_det.core nor hpc_det.pytorch.
    """
    traces = [_traces(undisturbed), _traces(stopped)]
    if len(traces[0]) != len(traces[1]):
        raise HpcDetError(
            f"the trainings had {len(traces[0])} and {count(len(traces[1]), 'rank')}; set the number with --ranks"
        )
    differences = [*_in_reports(undisturbed, stopped)]
    for rank, pair in enumerate(zip(*traces, strict=True)):
        differences += _in_traces(rank, *pair)
    last = traces[1][0][-1]
    begins = [line["batch"] for line in traces[1][0] if line["first"]][1:]
    turns = read_lines(stopped.resume_stops)
    saved = sorted((each for each in differences if each.is_saved), key=_place)
    unsaved = [each for each in differences if not each.is_saved]
    return Comparison(
        batches=last["batch"],
        resumes=tuple(line["resumed"] for line in turns if "resumed" in line) or tuple(begins),
        first=tuple(each for each in saved if _place(each) == _place(saved[0])),
        lost=tuple(_lost(unsaved, begins)),
        unlike=tuple(each for each in unsaved if each.batch == 0),
        is_script=bool(last.get("loop")),
        repeated=tuple(_repeated(turns)),
    )


def _repeated(turns: Sequence[Mapping[str, int]]) -> Iterator[tuple[int, int]]:
    """Yield the stops of a script from which it did not resume. `turns`: the lines of `TrialFolder.resume_stops`."""
    for one, other in itertools.pairwise(turns):
        if "batch" in one and (resumed := other.get("resumed", one["batch"])) < one["batch"]:
            yield one["batch"], resumed


def _traces(trial: TrialFolder) -> list[list[TraceEntry]]:
    """Return the trace of each rank."""
    files = sorted(trial.resume_trace(0).parent.glob("rank-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))
    traces = [read_counted(file, "batch") for file in files]
    if not all(traces) or not traces:
        raise HpcDetError(
            "the training wrote no trace of its batches: it uses neither hpc_det.core nor hpc_det.pytorch, or it ended "
            "before its first batch"
        )
    return traces


def _in_traces(rank: int, undisturbed: Sequence[TraceEntry], stopped: Sequence[TraceEntry]) -> Iterator[Difference]:
    others = {line["batch"]: line for line in stopped}
    for line in undisturbed:
        batch = line["batch"]
        if line.get("calls") and batch not in others:  # a loop may ask for stops at other steps after a resume
            continue
        variables = others.get(batch, {}).get("variables")
        for part in ("state", "data", "metrics"):
            former, other = line.get(part, {}), others.get(batch, {}).get(part, {})
            for name in former | other:
                if former.get(name) != other.get(name) and not (part == "state" and _is_unset(name, variables)):
                    values = {"undisturbed": former.get(name), "stopped": other.get(name)}
                    yield Difference(batch=batch, part=part, name=name, rank=rank, **values)


def _is_unset(name: str, variables: Sequence[str] | None) -> bool:
    """Return whether `name` belongs to a variable that has no value in a script. `variables`: those that have one.

    A loop sets such a variable before it reads it, as the batch or the loss.
    """
    if variables is None or not name.startswith((VARIABLE, GLOBAL)):
        return False
    places = [place for place in variables if name.startswith(place)]
    return all(re.match(r"\w", name[len(place) :]) for place in places)


def _in_reports(undisturbed: TrialFolder, stopped: TrialFolder) -> Iterator[Difference]:
    one, other = _reports(undisturbed), _reports(stopped)
    for key in one | other:
        (batch, part), left, right = key, one.get(key, {}), other.get(key, {})
        for name in left | right:
            values = _text(left, name), _text(right, name)
            if values[0] != values[1]:
                yield Difference(batch=batch, part=part, name=name, undisturbed=values[0], stopped=values[1])


def _reports(trial: TrialFolder) -> dict[tuple[int, str], dict[str, Any]]:
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for report in read_reports(trial.metrics):  # a script may make several reports at a batch
        found.setdefault((report["steps"], report["kind"]), {}).update(report["metrics"])
    return found


def _text(metrics: Mapping[str, Any], name: str) -> str | None:
    return json.dumps(metrics[name]) if name in metrics else None


_ORDER = ("training", "validation", "state", "data", "metrics")
"""Order of the parts: reports at a batch precede the training of that batch."""


def _place(difference: Difference) -> tuple[int, int]:
    return difference.batch, _ORDER.index(difference.part)


def _lost(unsaved: Sequence[Difference], resumes: Sequence[int]) -> Iterator[Difference]:
    """Yield each lost value once, at the resume that lost it, and only the first entry of a list."""
    seen: dict[tuple[int | None, str], int] = {}
    for each in sorted(unsaved, key=_place):
        place = each.rank, _without_position(each.name)
        if place not in seen and each.batch in resumes:
            yield each
        seen.setdefault(place, each.batch)


def _without_position(name: str) -> str:
    """Return the name without its index: if one entry of a list differs, those after it usually do, too."""
    return re.sub(r"\[[\d(].*\]$", "[]", name)
