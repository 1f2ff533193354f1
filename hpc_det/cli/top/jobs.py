"""What the schedulers say of the user's jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.scheduler import JobState, JobStatus, run_command
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.view.watch import NO_NEWS

NEWEST_S = 5.0
"""A younger answer is not asked for again, whoever had it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job, or an array of them, that has not ended."""

    job_id: str
    experiment: int
    state: JobState
    reason: str


class Answers:
    """The last of each job, also while a question waits for its answer."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._said: dict[str, JobStatus] = {}

    def ask(self, job_ids: Mapping[str, Sequence[str]]) -> None:
        """About jobs by scheduler. It may take as long as a scheduler takes to answer."""
        for name, its_jobs in job_ids.items():
            answers = SharedAnswers(self._root, schedulers.scheduler(name))
            self._said |= answers.news(its_jobs, run_command, NEWEST_S) or {}

    def of(self, job_ids: Sequence[str]) -> list[JobStatus]:
        return [self._said.get(job_id, NO_NEWS) for job_id in job_ids]


def in_queue(experiment: int, job_ids: Sequence[str], statuses: Sequence[JobStatus]) -> list[Job]:
    """Those that have not ended."""
    return [
        Job(job_id=job_id, experiment=experiment, state=status.state, reason=status.reason)
        for job_id, status in zip(job_ids, statuses, strict=True)
        if status.state is not JobState.ENDED
    ]
