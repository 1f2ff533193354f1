"""What `hpc-det job update --priority` does, for all jobs of experiments."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_det.cli.job.here import queue_to_change, waits
from hpc_det.cli.job.operations import operation
from hpc_det.cli.job.updates import update
from hpc_det.cli.several import at_once
from hpc_det.errors import UsageError
from hpc_det.schedulers.queue import QueuedJob
from hpc_det.schedulers.scheduler import run_command, scheduler
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView


def update_jobs(experiments: Sequence[ExperimentFolder], priority: str) -> list[str]:
    """What is so now, a sentence each. Raises HpcDetError, with the queue as it was before."""
    views = at_once(experiments, _with_a_queue)
    queue = queue_to_change().jobs(run_command)
    jobs = [job_id for of_one in at_once(views, lambda view: _waiting(view, queue)) for job_id in of_one]
    return update(at_once(jobs, lambda job_id: operation(job_id, "priority", priority)))


def _with_a_queue(experiment: ExperimentFolder) -> ExperimentView:
    """Raises UsageError for an experiment of this machine alone."""
    view = ExperimentView(experiment)
    if view.jobs and not scheduler(view.jobs[0].scheduler).has_queue:
        raise UsageError(f"experiment {experiment.id}: runs on this machine, where no job waits in a queue")
    return view


def _waiting(view: ExperimentView, queue: Sequence[QueuedJob]) -> list[str]:
    """Those that the scheduler has still to start. Raises UsageError where there is none."""
    if found := [job_id for job_id in view.job_ids() if waits(job_id, queue)]:
        return found
    raise UsageError(f"experiment {view.id}: has no job that waits in the queue")
