"""The first difference between two trainings of which one was stopped and resumed, and what a resume has lost."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_counted
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.store.trace_names import UNSAVED

Line: TypeAlias = dict[str, Any]
"""See `hpc_det.pytorch.state.resume_trace`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    batch: int
    """The state before it, its data or its metrics; for a report, so many batches were trained."""
    part: str
    """`state`, `data`, `metrics`, `training` or `validation`; the last two are reports."""
    name: str
    undisturbed: str | None
    stopped: str | None
    """None: the value is there in the other training alone."""
    rank: int | None = None
    """None for a report, which is that of all ranks."""

    @property
    def is_saved(self) -> bool:
        """Whether a resume has to restore it for the trainings to be the same."""
        return not self.name.startswith(UNSAVED)


@dataclass(frozen=True)
class Comparison:
    batches: int
    """Trained by both."""
    resumes: tuple[int, ...]
    """The batches with which attempts of the stopped training began, but for the first one."""
    first: tuple[Difference, ...]
    """All at the first batch, and the first of its parts, where something differs. Unsaved state does not count."""
    lost: tuple[Difference, ...]
    """Unsaved state that was the same before a stop and another one after it."""
    unlike: tuple[Difference, ...]
    """Unsaved state that was another one from the start."""

    @property
    def is_identical(self) -> bool:
        return not self.first


def compare(undisturbed: TrialFolder, stopped: TrialFolder) -> Comparison:
    """Raises HpcDetError for a training that has left no trace, as a script's without the Trainer of hpc_det does."""
    traces = [_traces(undisturbed), _traces(stopped)]
    if len(traces[0]) != len(traces[1]):
        raise HpcDetError(f"the trainings had {len(traces[0])} and {len(traces[1])} ranks; give the number by --ranks")
    differences = [*_in_reports(undisturbed, stopped)]
    for rank, pair in enumerate(zip(*traces, strict=True)):
        differences += _in_traces(rank, *pair)
    last = traces[1][0][-1]
    resumes = [line["batch"] for line in traces[1][0] if line["first"]][1:]
    saved = sorted((each for each in differences if each.is_saved), key=_place)
    unsaved = [each for each in differences if not each.is_saved]
    return Comparison(
        batches=last["batch"],
        resumes=tuple(resumes),
        first=tuple(each for each in saved if _place(each) == _place(saved[0])),
        lost=tuple(_lost(unsaved, resumes)),
        unlike=tuple(each for each in unsaved if each.batch == 0),
    )


def _traces(trial: TrialFolder) -> list[list[Line]]:
    """By rank."""
    files = sorted(trial.resume_trace(0).parent.glob("rank-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))
    traces = [read_counted(file, "batch") for file in files]
    if not all(traces) or not traces:
        raise HpcDetError(
            "the training has left no trace of its batches: only trials and the Trainer of hpc_det.pytorch do that"
        )
    return traces


def _in_traces(rank: int, undisturbed: Sequence[Line], stopped: Sequence[Line]) -> Iterator[Difference]:
    others = {line["batch"]: line for line in stopped}
    for line in undisturbed:
        batch = line["batch"]
        for part in ("state", "data", "metrics"):
            former, other = line.get(part, {}), others.get(batch, {}).get(part, {})
            for name in former | other:
                if former.get(name) != other.get(name):
                    values = {"undisturbed": former.get(name), "stopped": other.get(name)}
                    yield Difference(batch=batch, part=part, name=name, rank=rank, **values)


def _in_reports(undisturbed: TrialFolder, stopped: TrialFolder) -> Iterator[Difference]:
    one, other = _reports(undisturbed), _reports(stopped)
    for key in one | other:
        (batch, part), left, right = key, one.get(key, {}), other.get(key, {})
        for name in left | right:
            values = _text(left, name), _text(right, name)
            if values[0] != values[1]:
                yield Difference(batch=batch, part=part, name=name, undisturbed=values[0], stopped=values[1])


def _reports(trial: TrialFolder) -> dict[tuple[int, str], dict[str, Any]]:
    return {(report["steps"], report["kind"]): report["metrics"] for report in read_reports(trial.metrics)}


def _text(metrics: Mapping[str, Any], name: str) -> str | None:
    return json.dumps(metrics[name]) if name in metrics else None


_ORDER = ("training", "validation", "state", "data", "metrics")
"""Reports at a batch come before that batch is trained."""


def _place(difference: Difference) -> tuple[int, int]:
    return difference.batch, _ORDER.index(difference.part)


def _lost(unsaved: Sequence[Difference], resumes: Sequence[int]) -> Iterator[Difference]:
    """Each once, at the resume that lost it, and of the entries of a list the first."""
    seen: dict[tuple[int | None, str], int] = {}
    for each in sorted(unsaved, key=_place):
        place = each.rank, _without_position(each.name)
        if place not in seen and each.batch in resumes:
            yield each
        seen.setdefault(place, each.batch)


def _without_position(name: str) -> str:
    """A list of times is another one from its first entry on, and each new entry is."""
    return re.sub(r"\[[\d(].*\]$", "[]", name)
