"""Commands that change what a job does."""

from __future__ import annotations

import getpass
import time

from hpc_det.cli import state as experiment_state
from hpc_det.cli.state import ExperimentState
from hpc_det.cli.watch import POLL_S, ask_every_s, states
from hpc_det.errors import HpcDetError
from hpc_det.search.journal import SearchJournal
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.stop import request_stop
from hpc_det.submit import scheduler as schedulers
from hpc_det.submit.command import run_command
from hpc_det.submit.scheduler import JobState

KILL_WAIT_S = 40.0
"""Slurm itself waits KillWait, 30 s by default, between TERM and KILL (slurm.conf(5))."""


def kill(experiment: ExperimentFolder) -> str:
    """End the experiment without saving; what came of it, in a sentence.

    Raises HpcDetError where it has ended already, or does not end.
    """
    found = states([experiment])[experiment.id]
    if found.is_final:
        raise HpcDetError(f"experiment {experiment.id} has ended already: {found.value}")
    source = f"hpc-det experiment kill by {getpass.getuser()}"
    search = SearchJournal(experiment)
    search.cancel(source)
    for work in search.state().open.values():
        experiment.trial(work.trial).create()
        request_stop(experiment.trial(work.trial).stop, attempt=None, reason="kill", source=source)
    _cancel(experiment)
    for worker, job in tuple(search.state().present.items()):
        search.lose(worker, job)
    found = experiment_state.state(experiment, [])
    if found is ExperimentState.CANCELED:
        return f"Killed experiment {experiment.id}"
    return f"Experiment {experiment.id} ended by itself just now: {found.value}"


def _cancel(experiment: ExperimentFolder) -> None:
    """Returns when the scheduler says that all jobs are gone."""
    if not (submitted := experiment_state.jobs(experiment)):
        return
    scheduler, ids = schedulers.scheduler(submitted[0].scheduler), experiment_state.job_ids(experiment)
    for job_id in ids:
        scheduler.cancel(job_id, run_command)
    end = time.monotonic() + KILL_WAIT_S
    while left := [i for i, status in scheduler.status(ids, run_command).items() if status.state is not JobState.ENDED]:
        if time.monotonic() > end:
            raise HpcDetError(
                f"experiment {experiment.id}: told to end, but its job {left[0]} is still there after "
                f"{KILL_WAIT_S:.0f} s; look again with `hpc-det experiment describe {experiment.id}`"
            )
        time.sleep(max(POLL_S, ask_every_s(scheduler)))


def release_hold(experiment: ExperimentFolder) -> str:
    """Let requeued jobs start now, if any are held back; what was done, in a sentence."""
    submitted = experiment_state.jobs(experiment)
    if not submitted or experiment_state.settled(experiment):
        return f"Experiment {experiment.id} has ended; there is no job to release"
    scheduler = schedulers.scheduler(submitted[0].scheduler)
    statuses = scheduler.status(experiment_state.job_ids(experiment), run_command)
    held = [job_id for status in statuses.values() for job_id in status.held]
    if not held:
        told = ", ".join(f"job {job_id} is {status.state.value}" for job_id, status in statuses.items())
        return f"Experiment {experiment.id} is not held: {told}"
    for job_id in held:
        scheduler.release(job_id, run_command)
    return f"Released experiment {experiment.id}: job {', '.join(held)} may start now"
