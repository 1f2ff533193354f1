"""Commands that change what a job does."""

from __future__ import annotations

import getpass
import time

from hpc_det.cli import story
from hpc_det.cli.story import ExperimentState, SubmittedJob
from hpc_det.cli.watch import POLL_S, ask_every_s, states
from hpc_det.errors import HpcDetError
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.stop import request_stop
from hpc_det.submit import scheduler as schedulers
from hpc_det.submit.command import run_command
from hpc_det.submit.scheduler import JobState, JobStatus

KILL_WAIT_S = 40.0
"""Slurm itself waits KillWait, 30 s by default, between TERM and KILL (slurm.conf(5))."""


def kill(experiment: ExperimentFolder) -> str:
    """End the experiment without saving; what came of it, in a sentence.

    Raises HpcDetError where it has ended already, or does not end.
    """
    trial, job = experiment.trial(), story.job(experiment.trial())
    found = states([experiment])[experiment.id]
    if found.is_final:
        raise HpcDetError(f"experiment {experiment.id} has ended already: {found.value}")
    request_stop(trial.stop, attempt=None, reason="kill", source=f"hpc-det experiment kill by {getpass.getuser()}")
    if job:
        _cancel(experiment, job)
    found = story.state(trial, JobStatus(JobState.ENDED))
    if found is ExperimentState.CANCELED:
        return f"Killed experiment {experiment.id}"
    return f"Experiment {experiment.id} ended by itself just now: {found.value}"


def _cancel(experiment: ExperimentFolder, job: SubmittedJob) -> None:
    """Returns when the scheduler says that the job is gone."""
    scheduler = schedulers.scheduler(job.scheduler)
    scheduler.cancel(job.job_id, run_command)
    end = time.monotonic() + KILL_WAIT_S
    while scheduler.status([job.job_id], run_command)[job.job_id].state is not JobState.ENDED:
        if time.monotonic() > end:
            raise HpcDetError(
                f"experiment {experiment.id}: told to end, but its job {job.job_id} is still there after "
                f"{KILL_WAIT_S:.0f} s; look again with `hpc-det experiment describe {experiment.id}`"
            )
        time.sleep(max(POLL_S, ask_every_s(scheduler)))


def release_hold(experiment: ExperimentFolder) -> str:
    """Let a requeued job start now, if it is held back; what was done, in a sentence."""
    job = story.job(experiment.trial())
    if job is None or story.settled(experiment.trial()):
        return f"Experiment {experiment.id} has ended; there is no job to release"
    scheduler = schedulers.scheduler(job.scheduler)
    status = scheduler.status([job.job_id], run_command)[job.job_id]
    if status.state is not JobState.HELD:
        return f"Experiment {experiment.id} is not held: its job {job.job_id} is {status.state.value}"
    scheduler.release(job.job_id, run_command)
    return f"Released experiment {experiment.id}: its job {job.job_id} may start now"
