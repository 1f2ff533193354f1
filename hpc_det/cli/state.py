"""The state of an experiment: from its search's journal, and from the scheduler as long as that does not settle it.

The scheduler is asked before the files are read, so an end that came in between is seen.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_det.cli import story
from hpc_det.search.journal import SearchJournal
from hpc_det.search.method import Exit
from hpc_det.search.state import SearchState
from hpc_det.store.folders import ExperimentFolder
from hpc_det.submit.scheduler import JobState, JobStatus


class ExperimentState(str, enum.Enum):
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    CANCELED = "CANCELED"

    @property
    def is_final(self) -> bool:
        return self not in (ExperimentState.QUEUED, ExperimentState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """What the scheduler was given in one call: a job, or an array of them."""

    job_id: str
    scheduler: str
    submitted: float
    first: int
    workers: int


def jobs(experiment: ExperimentFolder) -> list[SubmittedJob]:
    """All that was submitted, oldest first."""
    records: list[SubmittedJob] = []
    while data := story.read_tolerantly(experiment.job(len(records) + 1)):
        records.append(SubmittedJob(**data))
    return records


def job_ids(experiment: ExperimentFolder) -> list[str]:
    """Of its jobs and arrays, and of jobs that somebody started with a script by hand and that have not left."""
    submitted = [job.job_id for job in jobs(experiment)]
    present = SearchJournal(experiment).state().present.values()
    return list(dict.fromkeys([*submitted, *(job for job in present if job.partition("_")[0] not in submitted)]))


def settled(experiment: ExperimentFolder) -> ExperimentState | None:
    """The final state; None as long as the scheduler has to be asked."""
    search = SearchJournal(experiment).state()
    return _final(search) if search.finished and not search.present else None


def state(experiment: ExperimentFolder, statuses: Iterable[JobStatus]) -> ExperimentState:
    """What the files say, or else the `statuses` of its jobs."""
    search = SearchJournal(experiment).state()
    if search.finished and not search.present:
        return _final(search)
    found = {status.state for status in statuses}
    if JobState.RUNNING in found:
        return ExperimentState.RUNNING
    if found & {JobState.QUEUED, JobState.HELD}:
        return ExperimentState.QUEUED
    if JobState.UNKNOWN in found or not found:
        return ExperimentState.RUNNING if search.present else ExperimentState.QUEUED
    return _final(search) if search.finished else ExperimentState.ERROR


def _final(search: SearchState) -> ExperimentState:
    """It has succeeded where at least one trial has (upstream's rule: master/internal/trial.go)."""
    if search.cancelled:
        return ExperimentState.CANCELED
    if search.given_up:
        return ExperimentState.ERROR
    ends = {trial.ended or Exit.COMPLETED for trial in search.trials.values()}
    if Exit.COMPLETED in ends:
        return ExperimentState.COMPLETED
    return ExperimentState.CANCELED if Exit.CANCELLED in ends else ExperimentState.ERROR


def why_not_completed(experiment: ExperimentFolder, found: ExperimentState) -> str:
    """One sentence, with the first failure where there is one."""
    search = SearchJournal(experiment).state()
    if found is ExperimentState.CANCELED:
        return f"cancelled by {search.cancelled}" if search.cancelled else _cancelled(experiment)
    if search.given_up:
        return search.given_up
    trials = [trial for trial in experiment.trials() if story.verdict(trial) is not Exit.COMPLETED]
    if not trials:
        return "the jobs ended without a word, before their first attempt"
    why = story.why_not_completed(trials[0])
    of_several = search.method.trials_expected > 1
    return (
        f"{len(trials)} of {search.method.trials_expected} trials; trial {trials[0].id}: {why}" if of_several else why
    )


def _cancelled(experiment: ExperimentFolder) -> str:
    sources = (story.cancellation(trial) for trial in experiment.trials())
    return next((f"cancelled by {request.source}" for request in sources if request), "cancelled")
