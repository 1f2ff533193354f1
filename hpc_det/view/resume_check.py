"""Compare two short trainings, one of which was stopped and resumed, to decide whether a trial resumes exactly.

The comparison contains the first difference and what a resume has lost; `causes` gives the probable causes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import read_counted
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from hpc_det.store.trace_names import GENERATOR, LOADER, UNSAVED, WRAPPED_BY, unwrapped

TraceEntry: TypeAlias = dict[str, Any]
"""A line of a trace, which describes one batch; see `hpc_det.pytorch.state.resume_trace`."""


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

    @property
    def is_identical(self) -> bool:
        return not self.first


def compare(undisturbed: TrialFolder, stopped: TrialFolder) -> Comparison:
    """Return the comparison of two trainings of the same trial.

    Raises HpcDetError if a training has no trace, for instance a script without hpc_det's Trainer.
    """
    traces = [_traces(undisturbed), _traces(stopped)]
    if len(traces[0]) != len(traces[1]):
        raise HpcDetError(f"the trainings had {len(traces[0])} and {len(traces[1])} ranks; set the number with --ranks")
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


def _traces(trial: TrialFolder) -> list[list[TraceEntry]]:
    """Return the trace of each rank."""
    files = sorted(trial.resume_trace(0).parent.glob("rank-*.jsonl"), key=lambda file: int(file.stem.split("-")[1]))
    traces = [read_counted(file, "batch") for file in files]
    if not all(traces) or not traces:
        raise HpcDetError(
            "the training wrote no trace of its batches; only trials and the Trainer of hpc_det.pytorch write one"
        )
    return traces


def _in_traces(rank: int, undisturbed: Sequence[TraceEntry], stopped: Sequence[TraceEntry]) -> Iterator[Difference]:
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


# --- causes


Kind = Literal[
    "state",  # a value that no checkpoint holds
    "generator",  # a random generator that no checkpoint holds, or that begins anew with another seed
    "module",  # this and the next three: an object that the trial did not wrap with its context
    "optimizer",
    "scheduler",
    "scaler",
    "data",  # the data set, its workers or a sampler
    "not restored",  # the value differs as soon as the checkpoint is loaded
    "nondeterminism",  # the trainings may differ without any stop
    "hidden state",  # what is neither in a checkpoint nor in a value that is compared
]

_IN_A_CHECKPOINT = (
    "make it a buffer of a wrapped model (register_buffer), or keep it in a callback with state_dict and "
    "load_state_dict, which checkpoints hold"
)
_DETERMINISTIC = (
    "draw from seeded generators alone; call torch.use_deterministic_algorithms(True) in the trial's __init__, on a "
    "GPU with CUBLAS_WORKSPACE_CONFIG=:4096:8 in environment.environment_variables"
)
_SEEDED = (
    "seed every generator of the data set and of its workers from the trial's seed (context.get_trial_seed()), or draw "
    "from the generators of torch, numpy and random, which are seeded for each worker"
)
_STOPS_0 = "`--stops 0` shows whether trainings differ without any stop"


@dataclass(frozen=True)
class Cause:
    """The probable cause of a difference, and its remedy."""

    kind: Kind
    name: str | None
    """Name of the value that is lost or differs; None if unknown."""
    what: str
    remedy: str


def causes(found: Comparison) -> list[Cause]:
    """Return the causes, the most probable first; for equal trainings, the state that was lost without an effect."""
    if found.is_identical:
        return _each_once(found.lost)
    first = found.first[0]
    resumed = max((batch for batch in found.resumes if batch <= first.batch), default=None)
    if resumed is None:
        return [_before_any_stop(found, first)]
    if first.part == "state" and first.batch == resumed:
        return [_not_restored(first)]
    lost = _each_once(each for each in found.lost if each.batch <= first.batch)
    if first.part == "data":
        return [cause for cause in lost if LOADER in str(cause.name)] or [_lost_by_data(), *lost]
    return lost or list(_unknown(first, resumed))


def _each_once(lost: Iterable[Difference]) -> list[Cause]:
    return list(dict.fromkeys(map(_of_lost, lost)))


def _of_lost(lost: Difference) -> Cause:
    for kind, method in WRAPPED_BY.items():
        name, is_unwrapped, _ = lost.name.partition(f" {unwrapped(kind)}")
        if is_unwrapped:
            return Cause(kind, name, f"{name}: an unwrapped {kind}", f"wrap it with context.{method}")  # type: ignore[arg-type]
    if (lost.undisturbed or "").startswith(GENERATOR):
        remedy = f"draw from torch's own generator, which checkpoints hold, or {_IN_A_CHECKPOINT}"
        return Cause("generator", lost.name, f"{lost.name}: a random generator that no checkpoint holds", remedy)
    return Cause("state", lost.name, f"{lost.name}: state that no checkpoint holds", _IN_A_CHECKPOINT)


def _not_restored(first: Difference) -> Cause:
    return Cause(
        "not restored",
        first.name,
        f"{first.name}: differs as soon as the checkpoint is loaded",
        "give a buffer persistent=True; let hooks such as on_training_start neither draw nor change it after a resume",
    )


def _lost_by_data() -> Cause:
    what = "the data set, its workers or a sampler have a state or a generator that a resume loses"
    return Cause("data", None, what, _SEEDED)


def _unknown(first: Difference, resumed: int) -> Iterator[Cause]:
    """Yield the possible causes of a difference after the resume at batch `resumed`, the more probable first."""
    hidden = Cause(
        "hidden state",
        None,
        "the trial computes with something that is neither in a checkpoint nor in an attribute, such as a file or an "
        "iterator",
        f"{_IN_A_CHECKPOINT}; {_STOPS_0}",
    )
    kernel = _nondeterminism(f"{_DETERMINISTIC}; {_STOPS_0}")
    # state is recorded before a batch, so a difference in it arose in the batch before
    is_at_once = first.batch - (first.part == "state") <= resumed
    yield from (hidden, kernel) if is_at_once else (kernel, hidden)


def _before_any_stop(found: Comparison, first: Difference) -> Cause:
    for each in found.unlike:
        if (each.undisturbed or "").startswith(GENERATOR):
            return Cause("generator", each.name, f"{each.name}: a generator with another seed in each run", _SEEDED)
    if first.part == "data":
        what = "the data differ without any stop: an unseeded worker, or data read in no fixed order"
        return Cause("data", None, what, _SEEDED)
    if any(each.name.startswith("generators") for each in found.first):
        what = "the trial draws more random numbers in one training than in the other"
        return Cause("nondeterminism", None, what, "find what it draws that depends on time or on the machine")
    return _nondeterminism(_DETERMINISTIC)


def _nondeterminism(remedy: str) -> Cause:
    return Cause(
        "nondeterminism", None, "a kernel that is not deterministic, or a random source without a seed", remedy
    )
