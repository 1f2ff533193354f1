"""What can be done to a job's place in the queue, and when it is done."""

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
    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        """Raises UsageError where it cannot be done with these jobs."""

    def changes(self, queue: Queue, jobs: Sequence[QueuedJob]) -> list[Change]: ...

    def is_so(self, jobs: Sequence[QueuedJob]) -> bool:
        """Whether the queue is as it asks for."""

    def note(self, queue: Queue) -> str:
        """Why what is so then may have no effect; "" where it has. Raises CommandError."""

    def __str__(self) -> str:
        """What is so then, a sentence without its end."""


def operation(job_id: str, name: str, value: str) -> Operation:
    """Raises UsageError where the value is none for this operation."""
    made = _OPERATIONS.get(name)
    if made is None:
        hint = nearest(name, _OPERATIONS) or f"known: {', '.join(_OPERATIONS)}"
        raise UsageError(f"job {job_id}: no operation {name!r}; {hint}")
    return made(job_id, value)


def parsed(text: str) -> Operation:
    """`JOB.OPERATION=VALUE`, where JOB may hold dots. Raises UsageError."""
    left, _, value = text.partition("=")
    job_id, _, name = left.rpartition(".")
    if not job_id or not value:
        raise UsageError(f"{text!r}: expected JOB.OPERATION=VALUE such as 4711.priority=60")
    return operation(job_id, name, value)


@dataclass(frozen=True)
class _Prioritize:
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
    job_id: str
    pool: str

    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        if self.pool not in (pools := queue.pools(run_command)):
            raise UsageError(f"job {self.job_id}: no pool {self.pool!r}; known: {', '.join(sorted(pools))}")
        if not all(experiment_of(job) for job in _own(self.job_id, jobs)):
            raise UsageError(
                f"job {self.job_id}: is no experiment's, and only theirs change pools; cancel it, and submit it again"
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
    job_id: str
    other_id: str
    ahead: bool
    """Whether the job is to be ahead of the other, or behind it."""

    def check(self, jobs: Sequence[QueuedJob], queue: Queue) -> None:
        self._both(jobs)

    def changes(self, queue: Queue, jobs: Sequence[QueuedJob]) -> list[Change]:
        job, other = self._both(jobs)
        line = _line(jobs, job, other)
        first, last = sorted(_places(line, job, other))
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
        """Raises UsageError where they are not two jobs of one queue."""
        job = _only(self.job_id, _own(self.job_id, jobs))
        other = _only(self.other_id, waiting(self.other_id, jobs_named(self.other_id, jobs)))
        if job.named == other.named:
            raise UsageError(f"job {self.job_id}: has no place {'ahead of' if self.ahead else 'behind'} itself")
        if not set(job.pools) & set(other.pools):
            raise UsageError(
                f"job {self.job_id}: waits in pool {job.pool}, and job {self.other_id} in pool {other.pool}; jobs have "
                "an order within a pool only"
            )
        return job, other


def _own(job_id: str, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """The user's jobs of this id, as far as they wait."""
    return waiting(job_id, own_jobs(job_id, jobs))


def _only(job_id: str, found: Sequence[QueuedJob]) -> QueuedJob:
    if len(found) > 1:
        parts = ", ".join(job.job_id for job in found)
        raise UsageError(f"job {job_id}: its jobs wait in several places; name one of them: {parts}")
    return found[0]


def _line(jobs: Sequence[QueuedJob], job: QueuedJob, other: QueuedJob) -> list[QueuedJob]:
    """Who waits in a pool that both are in."""
    common = next(pool for pool in job.pools if pool in other.pools)
    return [one for one in jobs if one.waits and one.pool == common]


def _places(line: Sequence[QueuedJob], job: QueuedJob, other: QueuedJob) -> tuple[int, int]:
    names = [one.named for one in line]
    return names.index(job.named), names.index(other.named)


def _prioritize(job_id: str, value: str) -> Operation:
    if not value.isdecimal() or not FIRST <= int(value) <= LAST:
        raise UsageError(
            f"job {job_id}: {value!r} is no priority; expected a whole number from {FIRST} to {LAST}, lower is earlier"
        )
    return _Prioritize(job_id, int(value))


def _weigh(job_id: str, value: str) -> Operation:
    raise UsageError(
        f"job {job_id}: neither Slurm nor PBS has weights of jobs; shares belong to accounts and groups, and the "
        "site's administrators set them (Slurm: sacctmgr, fairshare; PBS: the file resource_group); use --priority, "
        "--ahead-of or --behind-of"
    )


_OPERATIONS: dict[str, Callable[[str, str], Operation]] = {
    "priority": _prioritize,
    "weight": _weigh,
    "resource-pool": _Move,
    "ahead-of": lambda job_id, other: _Order(job_id, other, ahead=True),
    "behind-of": lambda job_id, other: _Order(job_id, other, ahead=False),
}
