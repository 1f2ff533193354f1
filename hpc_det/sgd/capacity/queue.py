"""Jobs of submitit's in the scheduler's queue: how they stand there, and how they leave it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_det.schedulers import shared_answers
from hpc_det.schedulers.pbs.answers import element_statuses, from_pbs, to_pbs
from hpc_det.schedulers.pbs.scheduler import Pbs
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, array_of, run_command
from hpc_det.schedulers.shared_answers import SharedAnswers
from hpc_det.schedulers.slurm.scheduler import Slurm
from hpc_det.store.experiments import state_root

if TYPE_CHECKING:
    from submitit.core.core import Job

NO_NEWS = JobStatus(JobState.UNKNOWN, "not asked about yet")
_run = partial(run_command, timeout_s=10.0)
"""The driver waits for the answer."""


class PbsById(Pbs):
    """Jobs by submitit's ids: `12` and `12_3`."""

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        return element_statuses(job_ids, run)


class Queue:
    """`name`: submitit's of the cluster, "slurm" or "pbs"."""

    def __init__(self, name: str) -> None:
        self._is_slurm = name == "slurm"
        self._answers = SharedAnswers(state_root(os.environ), Slurm() if self._is_slurm else PbsById())
        self._known: dict[str, JobStatus] = {}

    def status(self, jobs: Iterable[Job[Any]]) -> dict[str, JobStatus]:
        """By id, what the scheduler has said at last; it is asked no more often than every 2 s."""
        ids = [job.job_id for job in jobs]
        if ids and (news := self._answers.news(ids, _run, shared_answers.ASK_S)) is not None:
            self._known = {job_id: self._known.get(job_id, NO_NEWS) for job_id in ids} | news
        return {job_id: self._known.get(job_id, NO_NEWS) for job_id in ids}

    def id_of(self, job: str) -> str:
        """submitit's, of the job that calls itself this in its environment."""
        return job if self._is_slurm else from_pbs(job)

    def withdraw(self, jobs: Collection[Job[Any]]) -> None:
        """What waits for its start."""
        for job_id in sorted({self._array_id(job.job_id) for job in jobs}):
            with suppress(CommandError):
                (Slurm() if self._is_slurm else Pbs()).withdraw(job_id, _run)

    def end(self, jobs: Collection[Job[Any]]) -> None:
        """At once: node agents would take a TERM for the notice of a preemption, which comes some time before.

        For a job, `scancel --signal=KILL` is a TERM too, with KillWait behind it; for a step it is none (measured).
        """
        if not self._is_slurm:
            for job in jobs:
                job.cancel(check=False)
            return
        ids = [job.job_id for job in jobs]
        for command in (["--signal=KILL", *(f"{job_id}.0" for job_id in ids)], ids):
            with suppress(CommandError):
                _run(["scancel", "--quiet", *command])

    def _array_id(self, job_id: str) -> str:
        return array_of(job_id if self._is_slurm else to_pbs(job_id))
