"""Operations on a waiting job: change its priority, its pool, or its position relative to another job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpc_det.cli.job.list import experiment_of, jobs_named, own_jobs, waiting
from hpc_det.errors import UsageError, nearest
from hpc_det.plan.priority import FIRST, LAST
from hpc_det.schedulers.queue import Change, Queue, QueuedJob
from hpc_det.schedulers.scheduler import run_command


class Operation(Protocol):
    """A requested change of one job. The parameter `jobs` is always the whole queue."""

    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        """Raise UsageError if the operation is not possible with these jobs."""

    def changes(self, queue: Queue, jobs: Sequence[QueuedJob]) -> list[Change]:
        """Return the commands that carry out the operation, each with the command that undoes it."""

    def is_so(self, jobs: Sequence[QueuedJob]) -> bool:
        """Return whether the queue already is as requested."""

    def note(self, queue: Queue) -> str:
        """Return why the change may have no effect at this site, or "" without such a reason. Raises CommandError."""

    def __str__(self) -> str:
        """Return the requested state as the start of a sentence, such as "Job 4711 has priority 60"."""


def operation(job_id: str, name: str, value: str) -> Operation:
    """Return the operation `name` for a job; raise UsageError for an unknown name or an invalid value."""
    made = _OPERATIONS.get(name)
    if made is None:
        hint = nearest(name, _OPERATIONS) or f"known: {', '.join(_OPERATIONS)}"
        raise UsageError(f"job {job_id}: no operation {name!r}; {hint}")
    return made(job_id, value)


def parsed(text: str) -> Operation:
    """Parse `JOB.OPERATION=VALUE`; raise UsageError for anything else."""
    left, _, value = text.partition("=")
    job_id, _, name = left.rpartition(".")  # the last dot, since IDs of PBS contain dots
    if not job_id or not value:
        raise UsageError(f"{text!r}: expected JOB.OPERATION=VALUE such as 4711.priority=60")
    return operation(job_id, name, value)


@dataclass(frozen=True)
class _Prioritize:
    """Give a job a priority."""

    job_id: str
    priority: int

    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        _own(self.job_id, jobs)

    def changes(self, queue: Queue, jobs: Sequence[QueuedJob]) -> list[Change]:
        return [change for job in _own(self.job_id, jobs) for change in queue.prioritize(job, self.priority)]

    def is_so(self, jobs: Sequence[QueuedJob]) -> bool:
        return all(job.priority == self.priority for job in _own(self.job_id, jobs))

    def note(self, queue: Queue) -> str:
        return queue.priority_note(run_command)

    def __str__(self) -> str:
        return f"Job {self.job_id} has priority {self.priority}"


@dataclass(frozen=True)
class _Move:
    """Move a job to another pool."""

    job_id: str
    pool: str

    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        if self.pool not in (pools := queue.pools(run_command)):
            raise UsageError(f"job {self.job_id}: no pool {self.pool!r}; known: {', '.join(sorted(pools))}")
        if not all(experiment_of(job) for job in _own(self.job_id, jobs)):
            raise UsageError(
                f"job {self.job_id}: does not belong to an experiment, and only jobs of experiments can change pools; "
                "cancel it and submit it again"
            )

    def changes(self, queue: Queue, jobs: Sequence[QueuedJob]) -> list[Change]:
        return [change for job in _own(self.job_id, jobs) for change in queue.move(job, self.pool)]

    def is_so(self, jobs: Sequence[QueuedJob]) -> bool:
        return all(job.pools == (self.pool,) for job in _own(self.job_id, jobs))

    def note(self, queue: Queue) -> str:
        return ""

    def __str__(self) -> str:
        return f"Job {self.job_id} waits in pool {self.pool}"


@dataclass(frozen=True)
class _Order:
    """Put a job ahead of another job or behind it."""

    job_id: str
    other_id: str
    ahead: bool
    """True: ahead of the other job. False: behind it."""

    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        self._both(jobs)

    def changes(self, queue: Queue, jobs: Sequence[QueuedJob]) -> list[Change]:
        job, other = self._both(jobs)
        line = _line(jobs, job, other)
        first, last = sorted(_places(line, job, other))
        # only the user's own jobs between the two: those of others cannot be changed
        between = [one for one in line[first + 1 : last] if one.user == job.user]
        return (queue.put_ahead if self.ahead else queue.put_behind)(job, other, between)

    def is_so(self, jobs: Sequence[QueuedJob]) -> bool:
        job, other = self._both(jobs)
        place, place_of_other = _places(_line(jobs, job, other), job, other)
        return (place < place_of_other) == self.ahead

    def note(self, queue: Queue) -> str:
        return ""

    def __str__(self) -> str:
        return f"Job {self.job_id} is {'ahead of' if self.ahead else 'behind'} job {self.other_id}"

    def _both(self, jobs: Sequence[QueuedJob]) -> tuple[QueuedJob, QueuedJob]:
        """Return the job and the other job; raise UsageError if they are not two waiting jobs of one pool."""
        job = _only(self.job_id, _own(self.job_id, jobs))
        other = _only(self.other_id, waiting(self.other_id, jobs_named(self.other_id, jobs)))
        if job.named == other.named:
            raise UsageError(f"job {self.job_id}: cannot be {'ahead of' if self.ahead else 'behind'} itself")
        if not set(job.pools) & set(other.pools):
            raise UsageError(
                f"job {self.job_id}: waits in pool {job.pool}, but job {self.other_id} in pool {other.pool}; only jobs "
                "of the same pool have an order"
            )
        return job, other


def _own(job_id: str, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Return the user's waiting jobs with this ID; raise UsageError if there is none."""
    return waiting(job_id, own_jobs(job_id, jobs))


def _only(job_id: str, found: Sequence[QueuedJob]) -> QueuedJob:
    """Return the only job of `found`; raise UsageError if there are several."""
    if len(found) > 1:
        parts = ", ".join(job.job_id for job in found)
        raise UsageError(f"job {job_id}: has jobs in several places of the queue; name one of them: {parts}")
    return found[0]


def _line(jobs: Sequence[QueuedJob], job: QueuedJob, other: QueuedJob) -> list[QueuedJob]:
    """Return the waiting jobs of a pool that both jobs are in, in scheduling order."""
    common = next(pool for pool in job.pools if pool in other.pools)
    return [one for one in jobs if one.waits and one.pool == common]


def _places(line: Sequence[QueuedJob], job: QueuedJob, other: QueuedJob) -> tuple[int, int]:
    """Return the positions of both jobs in `line`, from 0."""
    names = [one.named for one in line]
    return names.index(job.named), names.index(other.named)


def _prioritize(job_id: str, value: str) -> Operation:
    if not value.isdecimal() or not FIRST <= int(value) <= LAST:
        raise UsageError(
            f"job {job_id}: {value!r} is not a priority; expected a whole number from {FIRST} to {LAST}, lower starts "
            "earlier"
        )
    return _Prioritize(job_id, int(value))


def _weigh(job_id: str, value: str) -> Operation:
    raise UsageError(
        f"job {job_id}: neither Slurm nor PBS has weights of jobs; shares belong to accounts and groups and are set by "
        "the site's administrators (Slurm: sacctmgr, fairshare; PBS: the file resource_group); use --priority, "
        "--ahead-of or --behind-of"
    )


_OPERATIONS: dict[str, Callable[[str, str], Operation]] = {
    "priority": _prioritize,
    "weight": _weigh,
    "resource-pool": _Move,
    "ahead-of": lambda job_id, other: _Order(job_id, other, ahead=True),
    "behind-of": lambda job_id, other: _Order(job_id, other, ahead=False),
}
