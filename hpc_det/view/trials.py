"""The trials of an experiment: the state of each, and the number in each state."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_det.requeue import Action, Cause
from hpc_det.search.method import Exit
from hpc_det.search.state import SearchState
from hpc_det.store.folders import TrialFolder
from hpc_det.view.trial_history import AttemptHistory, closed_attempt, read_attempts


class TrialState(str, enum.Enum):
    """The state of a trial, as commands show it."""

    QUEUED = "QUEUED"
    """Created without a worker: its job waits, or was requeued."""
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    """Paused by the user, or by the searcher, which may train it further."""
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    INVALID = "INVALID"
    """The trial rejected its hyperparameters."""
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        return self not in (TrialState.QUEUED, TrialState.RUNNING, TrialState.PAUSED)


STATE_AFTER = {
    Exit.COMPLETED: TrialState.COMPLETED,
    Exit.FAILED: TrialState.ERROR,
    Exit.INVALID_HP: TrialState.INVALID,
    Exit.CANCELLED: TrialState.CANCELED,
}


def attempts_of(search: SearchState, trial: TrialFolder, *, is_over: bool) -> list[AttemptHistory]:
    """Return all attempts of a trial, oldest first. `is_over`: nothing of the experiment runs any more.

    If a job was killed after the last report to the search and before it recorded the end of the attempt, the end is
    derived from other files.
    """
    attempts = read_attempts(trial)
    if attempts and attempts[-1].is_open:
        last = attempts[-1]
        if is_over or search.present.get(last.worker) != last.job_id:
            is_completed = _end(search, trial.id, None) is TrialState.COMPLETED
            attempts[-1] = closed_attempt(trial, last, is_completed=is_completed)
    return attempts


def trial_state(
    search: SearchState, number: int, attempts: Sequence[AttemptHistory], *, is_over: bool = False
) -> TrialState:
    """Return the state of a trial that the search has created. `is_over`: nothing of the experiment runs any more."""
    last = attempts[-1] if attempts else None
    if last and last.is_open and search.present.get(last.worker) == last.job_id and not is_over:
        return TrialState.RUNNING
    if found := _end(search, number, last):
        return found
    has_worker = search.trials[number].worker is not None
    if search.cancelled or is_over:
        return TrialState.ERROR if has_worker and not search.cancelled else TrialState.CANCELED
    if has_worker:
        return TrialState.QUEUED if last and last.is_requeued else TrialState.RUNNING
    is_paused = search.paused or (last and last.action in (Action.WAIT, Action.PAUSE))
    return TrialState.PAUSED if is_paused else TrialState.QUEUED


def state_now(search: SearchState, trial: TrialFolder, *, is_over: bool) -> TrialState:
    """Return the state of a trial like `trial_state`, with the attempts from its journal."""
    return trial_state(search, trial.id, read_attempts(trial), is_over=is_over)


def _end(search: SearchState, number: int, last: AttemptHistory | None) -> TrialState | None:
    """Return the final state by the search, or else by the trial's journal, which is written first; None: no end."""
    if ended := search.trials[number].ended:
        return STATE_AFTER[ended]
    if search.method.is_closed(number):
        return TrialState.COMPLETED
    if last is None or last.continued:
        return None
    if last.action == Action.DONE:
        return TrialState.CANCELED if last.cause == Cause.CANCELLED else TrialState.COMPLETED
    return TrialState.ERROR if last.action == Action.GIVE_UP else None


@dataclass(frozen=True, kw_only=True)
class TrialCounts:
    """The numbers of trials of an experiment."""

    expected: int
    created: int
    running: int
    completed: int
    failed: int
    invalid: int
    """Trials that rejected their hyperparameters; except in a grid, others replace them."""

    @property
    def ended(self) -> int:
        """Number of trials that completed or failed; invalid ones do not count, since others replace them."""
        return self.completed + self.failed


def counted(search: SearchState, *, is_running: bool) -> TrialCounts:
    """Return the numbers of trials, without reading files of trials. `is_running`: a job of the experiment runs."""
    ends = [
        trial.ended or (Exit.COMPLETED if search.method.is_closed(number) else None)
        for number, trial in search.trials.items()
    ]
    return TrialCounts(
        expected=search.method.trials_expected,
        created=len(ends),
        running=len(search.open) if is_running else 0,
        completed=ends.count(Exit.COMPLETED),
        failed=ends.count(Exit.FAILED),
        invalid=ends.count(Exit.INVALID_HP),
    )


def differing(hparams: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names of values that are not the same in all trials; nested names are joined by dots."""
    flat = [flattened(each) for each in hparams]
    names = dict.fromkeys(name for each in flat for name in each)
    return [name for name in names if any(each.get(name) != flat[0].get(name) for each in flat)]


def flattened(hparams: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the hyperparameters in one level; nested names are joined by dots."""
    found: dict[str, Any] = {}
    for name, value in hparams.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
