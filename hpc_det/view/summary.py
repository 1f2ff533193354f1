"""The summary of an experiment: its row in lists, and parts of other outputs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.node.json_files import Moment, NewerFormat, Shape
from hpc_det.search.state import best_trial
from hpc_det.store.attempt import HOOK
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.formatting import clock
from hpc_det.view.state import ExperimentState, ExperimentView, NewerExperiment
from hpc_det.view.trial_history import Metrics, read_attempts, read_tolerantly
from hpc_det.view.trials import counted

DAMAGED = "(files damaged)"
NEWER = "(written by a newer hpc_det)"
NOT_SHOWN = "(cannot be shown)"
"""Shown for another user's experiment without access; `describe` shows the reason."""
WITHOUT_FACTS = (DAMAGED, NEWER, NOT_SHOWN)
"""The names in the rows of experiments that cannot be read."""
UNREADABLE = (HpcDetError, OSError, ValueError, LookupError, TypeError)
"""Errors of reading damaged or newer files."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A summary in plain values, as the index of experiments stores it. None: not known."""

    id: int
    name: str
    description: str = ""
    labels: list[str] = field(default_factory=list)
    archived: bool = False
    state: ExperimentState
    submitted: float | None = None
    """Seconds since the epoch."""
    batches: int | None = None
    """Batches of a single trial; None for several trials."""
    total_batches: int | None = None
    best: dict[str, Any] | None = None
    """A map of metric, value, batches and trial."""
    trials: dict[str, int] | None = None
    """The fields of `trials.TrialCounts`."""
    progress: float | None = None
    """A share from 0 to 1."""
    phase: str | None = None
    """Phase of a single trial before it trains, such as "compiling DeepSpeed ops"; None: it trains."""


def summary(view: ExperimentView, state: ExperimentState, metrics: Metrics | None = None) -> Summary:
    """Return the summary of an experiment in this state. If files are damaged, it contains the state and no progress.

    `metrics`: those of a single trial, if they were read already.
    """
    submitted = view.jobs[0].submitted if view.jobs else None
    try:
        known = {**view.about().as_json(), **progress(view, state, metrics), "phase": phase(view, state)}
    except UNREADABLE as error:
        known = {"name": _name_after(error)}
    return Summary(id=view.id, state=state, submitted=submitted, **known)


def unreadable(experiment: ExperimentFolder, error: Exception) -> Summary:
    """Return the summary of an experiment whose files cannot be read, because of this error."""
    name = _name_after(error)
    shown = name if experiment.is_own() or name == NEWER else NOT_SHOWN
    return Summary(id=experiment.id, name=shown, state=ExperimentState.ERROR)


def _name_after(error: Exception) -> str:
    return NEWER if isinstance(error, (NewerFormat, NewerExperiment)) else DAMAGED


def progress(view: ExperimentView, state: ExperimentState, metrics: Metrics | None = None) -> dict[str, Any]:
    """Return the fields of a Summary from `batches` on.

    With several trials they come from the search alone, since a list must not read the folders of a thousand trials.
    """
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
    """Return the best value: of the reports to the search or, with a single trial, of its validations."""
    searcher = view.config["searcher"]
    if not view.has_many_trials:
        return best_of_one(metrics or Metrics.read(view.folder.trial(), searcher), 1)
    found = best_trial(view.reports, searcher)
    if found is None:
        return None
    batches = found.length.amount if found.length and found.length.unit == "batches" else None
    return {"metric": found.metric, "value": found.value, "batches": batches, "trial": found.trial}


def best_of_one(metrics: Metrics, trial: int) -> dict[str, Any] | None:
    """Return the best validation of a trial: metric, value, batches and trial; None before the first one."""
    return {**asdict(metrics.best), "trial": trial} if metrics.best else None


_TIMES: Shape = {"began": Moment, "ended": Moment | None}
_PHASES: tuple[tuple[str, Callable[[TrialFolder, int], Path], str], ...] = (
    ("startup hook", TrialFolder.startup_hook, f"{HOOK} is running since {{}}; its ranks start after it"),
    ("compiling DeepSpeed ops", TrialFolder.compilation, "DeepSpeed compiles an op for this machine since {}"),
)
"""Phases of a trial before it trains: the name, the file with its times, and the sentence that `why` returns."""


def phase(view: ExperimentView, state: ExperimentState) -> str | None:
    """Return what the only trial does before it trains; None if it trains, or for several trials.

    Raises one of UNREADABLE if files are damaged.
    """
    found = _phase_and_sentence(view, state)
    return found[0] if found else None


def _phase_and_sentence(view: ExperimentView, state: ExperimentState) -> tuple[str, str] | None:
    open_now = view.search.open
    if state is not ExperimentState.RUNNING or not open_now or view.has_many_trials:
        return None
    trial = view.folder.trial(open_now[min(open_now)].trial)
    attempts = [attempt for attempt in read_attempts(trial)[-1:] if attempt.is_open]
    for attempt, (name, file, sentence) in product(attempts, _PHASES):
        times = read_tolerantly(file(trial, attempt.number), _TIMES)
        if times and times["ended"] is None:
            return name, sentence.format(clock(times["began"], time.time()))
    return None


def why(view: ExperimentView, state: ExperimentState) -> str | None:
    """Return in a sentence why the experiment is in this state, or None if the state needs no explanation."""
    search, before_training = view.search, _phase_and_sentence(view, state)
    match state:
        case ExperimentState.SUBMITTING:
            return f"by {view.submitter}"
        case ExperimentState.QUEUED:
            return view.waits_for
        case ExperimentState.PAUSED:
            return f"by {search.paused}"
        case ExperimentState.SUSPENDED:
            return "the scheduler has stopped its processes and will continue them later (see `hpc-det job list`)"
        case ExperimentState.RUNNING if search.cancelled:
            return f"{search.cancelled} has canceled it, and its trials are saving"
        case ExperimentState.RUNNING if search.paused:
            return f"{search.paused} has paused it, and its trials are saving"
        case ExperimentState.RUNNING if before_training:
            return before_training[1]
        case ExperimentState.ERROR | ExperimentState.CANCELED:
            return view.why_not_completed(state)
    return None
