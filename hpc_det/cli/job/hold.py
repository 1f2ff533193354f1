"""hpc-det job hold and release: keep waiting jobs from starting, and allow them to start again."""

from __future__ import annotations

import click

from hpc_det.cli.arguments import jobs_argument
from hpc_det.cli.job.list import own_jobs, queue_to_change, waiting
from hpc_det.cli.output import each
from hpc_det.errors import HpcDetError
from hpc_det.schedulers.scheduler import CommandError, JobState, run_command


@click.command()
@jobs_argument
def hold(jobs: list[str]) -> None:
    """Keep jobs from starting until `release`.

    \b
    Example:
      hpc-det job hold 4711
    """
    each(jobs, hold_one)


@click.command()
@jobs_argument
def release(jobs: list[str]) -> None:
    """Allow held jobs to start.

    This includes a requeued job, which Slurm holds for two minutes.

    \b
    Example:
      hpc-det job release 4711
    """
    each(jobs, release_one)


def hold_one(job_id: str) -> str:
    """Hold a waiting job and return a sentence for the user. Raises HpcDetError if the scheduler refuses."""
    queue = queue_to_change()
    for job in waiting(job_id, own_jobs(job_id, queue.jobs(run_command))):
        queue.hold(job, run_command)
    return f"Holding job {job_id}; release it with `hpc-det job release {job_id}`"


def release_one(job_id: str) -> str:
    """Release the job if it is held, and return a sentence for the user.

    Raises HpcDetError if the scheduler refuses.
    """
    queue = queue_to_change()
    found = own_jobs(job_id, queue.jobs(run_command))
    held = [job for job in found if job.state is JobState.HELD]
    if not held:
        why = f" ({found[0].reason})" if found[0].reason else ""
        return f"Job {job_id} is not held: it is {found[0].state.value}{why}"
    for job in held:
        try:
            queue.release(job, run_command)
        except CommandError as error:
            raise HpcDetError(
                f"job {job_id}: held ({job.reason}): {error}; only the site's operators can release a hold of the site"
            ) from None
    return f"Released job {job_id}: it may start now"
