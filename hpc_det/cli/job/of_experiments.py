"""What `hpc-det job update --priority` does, for all jobs of experiments."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_det.cli.job.operations import operation
from hpc_det.cli.job.updates import update
from hpc_det.cli.several import at_once
from hpc_det.errors import UsageError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView


def update_jobs(experiments: Sequence[ExperimentFolder], priority: str) -> list[str]:
    """What is so now, a sentence each. Raises HpcDetError, with the queue as it was before."""
    jobs = [job_id for of_one in at_once(experiments, _jobs) for job_id in of_one]
    return update(at_once(jobs, lambda job_id: operation(job_id, "priority", priority)))


def _jobs(experiment: ExperimentFolder) -> list[str]:
    if found := ExperimentView(experiment).job_ids():
        return found
    raise UsageError(f"experiment {experiment.id}: has no job yet; it gets one by `hpc-det experiment activate`")
