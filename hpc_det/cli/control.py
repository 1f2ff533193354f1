"""Commands that change what the jobs do."""

from __future__ import annotations

import getpass
import time

from hpc_det.errors import HpcDetError
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.command import run_command
from hpc_det.schedulers.scheduler import JobState, Scheduler
from hpc_det.search.journal import SearchJournal
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.stop import request_stop
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.watch import POLL_S, ask_every_s, state

KILL_WAIT_S = 40.0
"""Slurm itself waits KillWait, 30 s by default, between TERM and KILL (slurm.conf(5))."""


def kill(experiment: ExperimentFolder) -> str:
    """End all trials and jobs of the experiment without saving; what came of it, in a sentence.

    Raises HpcDetError where it has ended already, or does not end.
    """
    view = ExperimentView(experiment)
    found = state(view)
    if found.is_final:
        raise HpcDetError(f"experiment {experiment.id} has ended already: {found.value}")
    search = SearchJournal(experiment)
    _request(experiment, search, getpass.getuser())
    _cancel_jobs(view)
    for worker, job in tuple(search.state().present.items()):
        search.lose(worker, job)
    found = view.state([])
    if found is ExperimentState.CANCELED:
        return f"Killed experiment {experiment.id}"
    return f"Experiment {experiment.id} ended by itself just now: {found.value}"


def _request(experiment: ExperimentFolder, search: SearchJournal, source: str) -> None:
    """Nobody gets work any more, and who has some is to stop."""
    search.cancel(source)
    for work in search.state().open.values():
        trial = experiment.trial(work.trial)
        trial.create()  # its worker may be about to
        request_stop(trial.stop, attempt=None, reason="kill", source=source)


def _cancel_jobs(view: ExperimentView) -> None:
    """Returns when the scheduler says that all jobs are gone."""
    if not view.jobs:
        return
    view.look()
    scheduler, job_ids = schedulers.scheduler(view.jobs[0].scheduler), view.job_ids()
    for job_id in _left(scheduler, job_ids):
        scheduler.cancel(job_id, run_command)
    end = time.monotonic() + KILL_WAIT_S
    while left := _left(scheduler, job_ids):
        if time.monotonic() > end:
            raise HpcDetError(
                f"experiment {view.id}: told to end, but its job {left[0]} is still there after "
                f"{KILL_WAIT_S:.0f} s; look again with `hpc-det experiment describe {view.id}`"
            )
        time.sleep(max(POLL_S, ask_every_s(scheduler)))


def _left(scheduler: Scheduler, job_ids: list[str]) -> list[str]:
    statuses = scheduler.status(job_ids, run_command)
    return [job_id for job_id, status in statuses.items() if status.state is not JobState.ENDED]


def release_hold(experiment: ExperimentFolder) -> str:
    """Let requeued jobs start now, if any are held back; what was done, in a sentence."""
    view = ExperimentView(experiment)
    if not view.jobs or view.settled():
        return f"Experiment {experiment.id} has ended; there is no job to release"
    scheduler = schedulers.scheduler(view.jobs[0].scheduler)
    statuses = scheduler.status(view.job_ids(), run_command)
    held = [job_id for status in statuses.values() for job_id in status.held]
    if not held:
        told = ", ".join(f"job {job_id} is {status.state.value}" for job_id, status in statuses.items())
        return f"Experiment {experiment.id} is not held: its {told}"
    for job_id in held:
        scheduler.release(job_id, run_command)
    return f"Released experiment {experiment.id}: its job{'s' * (len(held) > 1)} {', '.join(held)} may start now"
