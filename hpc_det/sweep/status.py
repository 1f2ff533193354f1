"""The states and results of a sweep's points, from the files of its experiment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpc_det.errors import INTERRUPTED
from hpc_det.node.json_files import read_json
from hpc_det.search.journal import SearchJournal
from hpc_det.search.state import SearchState
from hpc_det.store.attempt import first_failure
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.journal import Journal
from hpc_det.sweep.files import SweepFiles
from hpc_det.view.trials import STATE_AFTER, TrialState
from hpc_det.view.watch import Watch


@dataclass(frozen=True, kw_only=True)
class PointStatus:
    """The state and the return value of a point."""

    experiment: int
    """Number of the experiment."""
    trial: int
    """Number of the point's trial in the experiment, from 1."""
    num: int
    """Hydra's number of the job, `hydra.job.num`."""
    overrides: list[str]
    state: TrialState
    returned: Any
    """The return value, if it is short and can be written as JSON."""
    text: str | None
    """The return value as Python shows it."""
    folder: str | None
    """Hydra's output folder; None until the point has started."""


def points(experiment: ExperimentFolder) -> list[PointStatus]:
    """Return all points of a sweep. Raises UsageError for another experiment."""
    files = SweepFiles(experiment)
    rows, search = files.read_points(), SearchJournal(experiment).state()
    return [_point(files, search, trial, row) for trial, row in enumerate(rows, start=1)]


def why_not_completed(experiment: ExperimentFolder, number: int) -> str:
    """Return one sentence that says why the trial has no return value, and which log to read."""
    return f"trial {number} of experiment {experiment.id}: {'; '.join(_reasons(experiment.trial(number)))}"


def failures(experiment: ExperimentFolder) -> list[str]:
    """Return a sentence for each point without a return value."""
    found = (point for point in points(experiment) if point.state is not TrialState.COMPLETED)
    return [why_not_completed(experiment, point.trial) for point in found]


def _point(files: SweepFiles, search: SearchState, trial: int, row: dict[str, Any]) -> PointStatus:
    shown = read_json(files.shown(trial)) or {}
    return PointStatus(
        experiment=files.experiment.id,
        trial=trial,
        num=row["num"],
        overrides=row["overrides"],
        state=_state(search, trial),
        returned=shown.get("value"),
        text=shown.get("text"),
        folder=shown.get("folder"),
    )


def _state(search: SearchState, trial: int) -> TrialState:
    """Return the state of a point from the search. A preempted point that waits in the queue is RUNNING, too."""
    known = search.trials.get(trial)
    if known and known.ended:
        return STATE_AFTER[known.ended]
    if search.cancelled:
        return TrialState.CANCELED
    return TrialState.RUNNING if known and known.worker is not None else TrialState.QUEUED


def _reasons(trial: TrialFolder) -> Iterator[str]:
    """Yield the parts of the sentence of `why_not_completed`."""
    journal = Journal(trial.journal)
    attempt = journal.last_attempt()
    if attempt == 0:
        yield "was not started"
        return
    failure, verdict = first_failure(trial, attempt), journal.verdict()
    if failure:
        yield failure.sentence()
    elif verdict:
        yield f"{verdict[0].value}: {verdict[2]}"
    else:
        yield "ended without reporting a cause"
    log = trial.rank_log(attempt, (failure and failure.rank) or 0)
    yield f"see {log if log.exists() else trial.job_log}"


def wait(experiment: ExperimentFolder, poll_s: float) -> None:
    """Wait until no job of the sweep runs or will run; check every `poll_s` seconds."""
    with left_by_ctrl_c(experiment):
        Watch(experiment).wait(poll_s)


@contextmanager
def left_by_ctrl_c(experiment: ExperimentFolder) -> Iterator[None]:
    """Turn Ctrl-C into SystemExit, which ends the waiting but not the sweep."""
    try:
        yield
    except KeyboardInterrupt:
        for line in (
            f"the jobs of experiment {experiment.id} continue",
            f"wait for them again with: hpc-det sweep wait {experiment.id}",
            f"end them with: hpc-det experiment kill {experiment.id}",
        ):
            print(f"hpc-det: {line}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
