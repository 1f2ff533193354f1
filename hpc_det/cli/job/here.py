"""The queue of this machine's scheduler, and a user's own jobs in it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress

from hpc_det.errors import UsageError
from hpc_det.schedulers.queue import Queue, QueuedJob, queue, this_user
from hpc_det.schedulers.scheduler import CommandError, run_command
from hpc_det.schedulers.site import schedulers_here


def queue_here() -> Queue | None:
    """None: no scheduler is on PATH. Of two, the first that answers."""
    queues = [queue(name) for name in schedulers_here(shutil.which)]
    for found in queues[:-1]:
        with suppress(CommandError):
            found.pools(run_command)
            return found
    return queues[-1] if queues else None


def queue_to_change() -> Queue:
    """Raises UsageError where this machine has none."""
    found = queue_here()
    if found is None:
        raise UsageError(
            "job: this machine has no scheduler, so jobs run at once and none waits; on a cluster, use a login node"
        )
    return found


def jobs_named(job_id: str, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """An array's id names all of it; one of PBS may be without its server. Raises UsageError where none is there."""
    found = {job.named: job for job in jobs if job_id in _names(job)}  # a job of two pools is listed twice
    if not found:
        raise UsageError(f"job {job_id}: not in the queue; `hpc-det job list --all-pools` shows what is")
    return list(found.values())


def own_jobs(job_id: str, jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Raises UsageError where one is another user's."""
    found = jobs_named(job_id, jobs)
    for job in found:
        if job.user != this_user():
            raise UsageError(f"job {job_id}: is {job.user}'s; only {job.user} and the site's operators may change it")
    return found


def waiting(job_id: str, found: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Those of the jobs found for the id that wait. Raises UsageError where all of them run."""
    if waits := [job for job in found if job.waits]:
        return waits
    raise UsageError(f"job {job_id}: runs already, and has no place in the queue any more")


def waits(job_id: str, jobs: Sequence[QueuedJob]) -> bool:
    """Whether any of the jobs of this id does."""
    return any(job.waits for job in jobs if job_id in _names(job))


def _names(job: QueuedJob) -> set[str]:
    without_server = job.job_id.partition(".")[0]
    return {job.job_id, without_server, without_server.partition("_")[0], without_server.removesuffix("[]")}
