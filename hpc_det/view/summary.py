"""An experiment in a line: what a list of all shows of each, and the parts that others tell of it, too."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.search.state import best_trial
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trial_history import Metrics
from hpc_det.view.trials import counted, length_unit

DAMAGED = "(files damaged)"
NOT_SHOWN = "(cannot be shown)"
"""Of somebody else's: `describe` says why."""
UNREADABLE = (HpcDetError, OSError, ValueError, LookupError, TypeError)
"""What comes of reading damaged files."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Plain values, as JSON keeps them."""

    id: int
    name: str
    description: str = ""
    labels: list[str] = field(default_factory=list)
    archived: bool = False
    state: ExperimentState
    submitted: float | None = None
    """In seconds since the epoch."""
    batches: int | None = None
    """Of the only trial; None where there are several."""
    total_batches: int | None = None
    best: dict[str, Any] | None = None
    """metric, value, batches, trial"""
    trials: dict[str, int] | None = None
    """A `trials.TrialCounts`."""
    progress: float | None = None
    """0 .. 1"""


def summary(view: ExperimentView, state: ExperimentState, metrics: Metrics | None = None) -> Summary:
    """Where its files are damaged, only the state stands for sure. `metrics`: of the only trial, if they are read."""
    submitted = view.jobs[0].submitted if view.jobs else None
    try:
        known = {**view.about().as_json(), **progress(view, state, metrics)}
    except UNREADABLE:
        known = {"name": DAMAGED}
    return Summary(id=view.id, state=state, submitted=submitted, **known)


def progress(view: ExperimentView, state: ExperimentState, metrics: Metrics | None = None) -> dict[str, Any]:
    """How far it is. Of several trials the search knows; a list must not read a thousand folders."""
    search, searcher = view.search, view.config["searcher"]
    counts = asdict(counted(search, is_running=state.has_job))
    if view.has_many_trials:
        return {
            "batches": None,
            "total_batches": None,
            "best": best(view),
            "trials": counts,
            "progress": search.method.progress,
        }
    metrics = metrics or Metrics.read(view.folder.trial(), searcher)
    known = metrics.batches / metrics.total if metrics.total else 0.0
    done = 1.0 if state is ExperimentState.COMPLETED else min(known, 1.0)
    return {
        "batches": metrics.batches,
        "total_batches": metrics.total,
        "best": best(view, metrics),
        "trials": counts,
        "progress": done,
    }


def best(view: ExperimentView, metrics: Metrics | None = None) -> dict[str, Any] | None:
    """By what trials told the search, or by the validations of the only one: `metrics`, if they are read."""
    searcher = view.config["searcher"]
    if not view.has_many_trials:
        return best_of_one(metrics or Metrics.read(view.folder.trial(), searcher), 1)
    found = best_trial(view.reports, searcher)
    if found is None:
        return None
    batches = found.length if length_unit(searcher) == "batches" else None
    return {"metric": found.metric, "value": found.value, "batches": batches, "trial": found.trial}


def best_of_one(metrics: Metrics, trial: int) -> dict[str, Any] | None:
    return {**asdict(metrics.best), "trial": trial} if metrics.best else None


def why(view: ExperimentView, state: ExperimentState) -> str | None:
    """What it waits for, what its trials do next, or what ended it, in a sentence."""
    search = view.search
    match state:
        case ExperimentState.SUBMITTING:
            return f"by {view.submitter}"
        case ExperimentState.QUEUED:
            return view.waits_for
        case ExperimentState.PAUSED:
            return f"by {search.paused}"
        case ExperimentState.SUSPENDED:
            return "its scheduler has stopped its processes, and continues them later (`hpc-det job list`)"
        case ExperimentState.RUNNING if search.cancelled:
            return f"{search.cancelled} has canceled it, and its trials save"
        case ExperimentState.RUNNING if search.paused:
            return f"{search.paused} has paused it, and its trials save"
        case ExperimentState.ERROR | ExperimentState.CANCELED:
            return view.why_not_completed(state)
    return None
