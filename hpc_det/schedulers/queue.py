"""The queue of a scheduler: its jobs in scheduling order, and the commands that change the order.

Each scheduler implements `Queue` in its folder, with command builders and output parsers.
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
    """A job that waits or runs, or the elements of an array that the scheduler lists together."""

    job_id: str
    """The id of the job, or of the array if elements wait together."""
    named: str
    """The id that addresses exactly this job, or these elements, in commands of the scheduler."""
    name: str
    user: str
    pool: str
    pools: tuple[str, ...]
    """All pools that the job waits in: a Slurm job may name several partitions, and is listed in each of them."""
    state: JobState
    """QUEUED, HELD (by a person, or until a time), or RUNNING."""
    reason: str
    """The scheduler's reason why the job waits."""
    submitted: float | None
    """When the job was submitted, in seconds since the epoch; None if unknown."""
    starts: float | None
    """When the job started or is expected to start, in seconds since the epoch; None if unknown."""
    priority: float
    """The priority that the user requested, on Determined's scale: lower runs earlier."""
    scheduler_priority: int | None
    """The scheduler's own priority: higher runs earlier. On Slurm, 0 for a held job. None: it reports none."""
    slots: int
    """GPUs of one job, or CPUs if it requests no GPU."""
    waiting: int
    """Number of waiting jobs in this entry; more than one for an array."""
    running: int
    """Number of running jobs in this entry."""
    path: str
    """A file or folder that identifies the job; for a job of an experiment, a path in the experiment's folder."""
    is_suspended: bool = False
    """Whether the processes of a RUNNING job are stopped."""
    waits_for: tuple[str, ...] = ()
    """The ids of the jobs whose end it waits for, if it waits for nothing else: it is the successor of a job."""

    @property
    def waits(self) -> bool:
        return self.waiting > 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A command that changes the queue, and the command that reverts it."""

    command: tuple[str, ...]
    undo: tuple[str, ...]
    who_may: str
    """The people who may run the command, and alternatives; shown if the scheduler refuses it to this user."""
    may_stop_halfway: bool = False
    """Whether the scheduler may refuse the command for some elements of an array only; `undo` then addresses all of
    them.
    """


class Queue(Protocol):
    """The queue of a scheduler, without state.

    Methods raise UsageError for a change that no command can make; the message says who can make it.
    """

    def jobs(self, run: Run, pool: str | None = None) -> list[QueuedJob]:
        """Return the jobs in scheduling order, running ones first. `pool` None: those of all pools. Raises
        CommandError.
        """

    def pools(self, run: Run) -> dict[str, bool]:
        """Return the names of the pools, each with whether it is the default for jobs that name none."""

    def prioritize(self, job: QueuedJob, priority: int) -> list[Change]:
        """Return the changes that give the job this priority, on Determined's scale."""

    def priority_note(self, run: Run) -> str:
        """Return why priorities may not affect the order of jobs here; "" if they do. Raises CommandError."""

    def move(self, job: QueuedJob, pool: str) -> list[Change]:
        """Return the changes that move the job to `pool`."""

    def put_ahead(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        """Return the changes that move `job` directly ahead of `other`.

        `between`: the user's own jobs that wait between the two, in queue order; `other` is currently ahead of `job`.
        """

    def put_behind(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        """Return the changes that move `job` directly behind `other`, which is currently behind it.

        `between`: as in `put_ahead`.
        """

    def hold(self, job: QueuedJob, run: Run) -> None:
        """Prevent a waiting job from starting."""

    def release(self, job: QueuedJob, run: Run) -> None:
        """Let a HELD job start."""


_CLASSES = {
    "slurm": ("hpc_det.schedulers.slurm.queue", "SlurmQueue"),
    "pbs": ("hpc_det.schedulers.pbs.queue", "PbsQueue"),
}


def queue(scheduler: str) -> Queue:
    """Return the queue of this scheduler, which must have one. Its module is imported only when it is used."""
    module, class_name = _CLASSES[scheduler]
    instance: Queue = getattr(import_module(module), class_name)()
    return instance


@cache  # a lookup in the site's user directory (LDAP) may be slow
def this_user() -> str:
    """Return the name of the effective user, from the system's user database and not from the environment."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may have no entry for its user
        return str(os.geteuid())
