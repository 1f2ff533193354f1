"""A scheduler's queue: the jobs in it, in scheduling order, and the commands that change their places.

As schedulers/scheduler.py: command builders and output parsers, one file for each scheduler.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Protocol

from hpc_det.schedulers.scheduler import JobState, Run


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job that waits or runs, or those elements of an array that the scheduler keeps together."""

    job_id: str
    """Of elements that wait together: their array's."""
    named: str
    """What the scheduler's commands take for exactly this job, or these elements."""
    name: str
    user: str
    pool: str
    pools: tuple[str, ...]
    """All that it waits in: on Slurm a job may name several, and is in each of their queues."""
    state: JobState
    """QUEUED, HELD by somebody or for a time, or RUNNING."""
    reason: str
    """Why it waits, in the scheduler's words."""
    submitted: float | None
    """In seconds since the epoch, as `starts`."""
    starts: float | None
    """When it has started, or is expected to."""
    priority: float
    """Determined's, the lower the earlier: what its user asked for."""
    scheduler_priority: int
    """The scheduler's own number, the higher the earlier; on Slurm 0 for a job that is held."""
    slots: int
    """GPUs, or CPUs where it asks for no GPU, of one job."""
    waiting: int
    running: int
    """How many jobs it stands for: of an array several."""
    path: str
    """A file or folder that tells whose job it is: of an experiment's job, one in the experiment's folder."""
    is_suspended: bool = False
    """RUNNING, but its processes are stopped."""

    @property
    def waits(self) -> bool:
        return self.waiting > 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A command of the scheduler's, and the one that takes it back."""

    command: tuple[str, ...]
    undo: tuple[str, ...]
    who_may: str
    """Who may do it where the scheduler refuses it to this user, and how else it could be had."""
    may_stop_halfway: bool = False
    """Whether it may be refused for some elements of an array, and done for the others; then `undo` is for all."""


class Queue(Protocol):
    """Stateless, as a Scheduler. What no command can do raises UsageError, which says who can do what."""

    def jobs(self, run: Run, pool: str | None = None) -> list[QueuedJob]:
        """In scheduling order, what runs first. None: of all pools. Raises CommandError."""

    def pools(self, run: Run) -> dict[str, bool]:
        """Their names, and whether jobs that name none come there."""

    def prioritize(self, job: QueuedJob, priority: int) -> list[Change]: ...

    def priority_note(self, run: Run) -> str:
        """Why priorities may not change the order of jobs here; "" where they do. Raises CommandError."""

    def move(self, job: QueuedJob, pool: str) -> list[Change]: ...

    def put_ahead(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        """`between`: the user's own jobs that wait between the two, in their order, where `other` is ahead so far."""

    def put_behind(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]: ...

    def hold(self, job: QueuedJob, run: Run) -> None:
        """Keep a job that waits from starting."""

    def release(self, job: QueuedJob, run: Run) -> None:
        """Let a job go that is HELD."""


_CLASSES = {
    "slurm": ("hpc_det.schedulers.slurm.queue", "SlurmQueue"),
    "pbs": ("hpc_det.schedulers.pbs.queue", "PbsQueue"),
}


def queue(scheduler: str) -> Queue:
    """Of the scheduler of this name, which has one, imported on use."""
    module, class_name = _CLASSES[scheduler]
    instance: Queue = getattr(import_module(module), class_name)()
    return instance


@cache  # a site's directory may be slow to ask
def this_user() -> str:
    """As the system calls them, whatever the environment says."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may not know its user
        return str(os.geteuid())
