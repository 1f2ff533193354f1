"""Pause, cancel and kill experiments and trials."""

from __future__ import annotations

import getpass
import time
from contextlib import suppress

from hpc_det.checkpoint.storage import collect
from hpc_det.errors import HpcDetError, UsageError, say
from hpc_det.node import full_disk
from hpc_det.notify.change import tell_rest
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.own_jobs import unknown_jobs
from hpc_det.schedulers.scheduler import CommandError, JobState, Scheduler, run_command
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import Reason, request_stop
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.store.local_run import insist_on_resumable, resumed_with
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trials import state_now
from hpc_det.view.watch import POLL_S, ask_every_s, state

# Seconds to wait for killed jobs. Slurm waits KillWait, by default 30 s, between TERM and KILL (slurm.conf(5)).
KILL_WAIT_S = 40.0


def pause_one(experiment: ExperimentFolder) -> str:
    """Let the trials of an experiment save and exit until `activate`, and return a sentence for the user.

    Raises UsageError if the experiment has already ended, or cannot resume.
    """
    view = ExperimentView(experiment)
    search = _still_there(view)
    insist_on_resumable(experiment)
    if not (former := view.search.paused):
        search.pause(getpass.getuser())
    _stop_trials(experiment, search, "pause")  # also if it is paused: the first `pause` may have been killed
    _withdraw_jobs(view)
    _tell_hooks(experiment)
    if former:
        return f"Experiment {experiment.id} was already paused by {former}"
    return f"Paused experiment {experiment.id}; resume it with {resumed_with(experiment, 'activate')}"


def cancel_one(experiment: ExperimentFolder) -> str:
    """Let the trials of an experiment save and end, and return a sentence for the user.

    Raises UsageError if the experiment has already ended.
    """
    view = ExperimentView(experiment)
    if finished := _end_jobs_left(view):
        return finished
    search = _still_there(view)
    search.cancel(getpass.getuser())
    _stop_trials(experiment, search, "cancel")
    _withdraw_jobs(view)
    _tell_hooks(experiment)
    if state(view).is_final:  # no worker is left to do it
        _collect_checkpoints(experiment)
    return f"Canceled experiment {experiment.id}: its trials save and end"


def kill_one(experiment: ExperimentFolder) -> str:
    """End all trials and jobs of an experiment without saving, and return a sentence for the user.

    Raises UsageError if the experiment has already ended, HpcDetError if a job does not end, or if the jobs have ended
    and a full disk kept that from being recorded.
    """
    view = ExperimentView(experiment)
    if finished := _end_jobs_left(view):
        return finished
    search = _still_there(view)
    try:
        search.cancel(getpass.getuser())
        _stop_trials(experiment, search, "kill")
    except OSError as error:
        full = full_disk.cause_in(error)
        if not full or view.is_local:  # a run outside a job ends when it reads the request
            raise
        _cancel_jobs(view)
        raise HpcDetError(
            f"experiment {experiment.id}: its jobs have ended; its state is {state(view).value}, since the kill could "
            f"not be recorded: {full_disk.sentence(full)}"
        ) from None
    _cancel_jobs(view)
    for worker, job in tuple(search.state().present.items()):  # a killed worker cannot record its end in the journal
        search.lose(worker, job)
    _tell_hooks(experiment)
    found = view.state([])
    if found is ExperimentState.CANCELED:
        _collect_checkpoints(experiment)
        return f"Killed experiment {experiment.id}"
    return f"Experiment {experiment.id} ended before it could be killed: {found.value}"


def kill_trial(trial: TrialFolder) -> str:
    """End one trial without saving, and return a sentence for the user.

    Raises UsageError if no worker trains it.
    """
    experiment = trial.experiment()
    name = f"{experiment.id}/{trial.id}"
    view = ExperimentView(experiment)
    search = _still_there(view)
    if trial.id not in {work.trial for work in search.state().open.values()}:
        found = state_now(view.search, trial, is_over=False)
        if found.is_final:
            raise UsageError(f"trial {name} has already ended: {found.value}")
        raise UsageError(
            f"trial {name} is {found.value}: no worker trains it now, and the search may never resume it; "
            f"`hpc-det experiment kill {experiment.id}` ends all trials"
        )
    trial.create()  # its worker may not have created the folder yet
    request_stop(trial.stop, attempt=None, reason="kill", source=getpass.getuser())
    return f"Killed trial {name}: it ends without another checkpoint"


def _still_there(view: ExperimentView) -> SearchJournal:
    """Return the journal of the experiment's search, to write to. Raises UsageError if the experiment has ended."""
    if (found := state(view)).is_final:
        is_finished = found is ExperimentState.COMPLETED  # nothing is left to train
        raise UsageError(
            f"experiment {view.id} has already ended: {found.value}"
            + ("" if is_finished else f"; {resumed_with(view.folder, 'continue')} trains it further")
        )
    return SearchJournal(view.folder)


def _end_jobs_left(view: ExperimentView) -> str | None:
    """End the jobs that are left if an earlier `cancel` or `kill` was itself killed.

    Returns a sentence for the user, or None if there are no such jobs.
    """
    if view.settled() is not ExperimentState.CANCELED or not (left := jobs_left(view)):
        return None
    _cancel_jobs(view)
    return f"Experiment {view.id} was already canceled; ended its remaining jobs: {', '.join(left)}"


def jobs_left(view: ExperimentView) -> list[str]:
    """Return the IDs of the experiment's jobs that have not ended. Raises CommandError."""
    return [*_left(schedulers.scheduler(view.jobs[0].scheduler), view.job_ids())] if view.jobs else []


def _tell_hooks(experiment: ExperimentFolder) -> None:
    """Notify the hooks if the experiment is paused or has ended; without workers, no other process would."""
    for problem in tell_rest(experiment):
        say(f"note: {problem}")


def _stop_trials(experiment: ExperimentFolder, search: SearchJournal, reason: Reason) -> None:
    """Write a stop request for each trial that a worker trains."""
    # the search was paused or cancelled before, so no worker receives another trial meanwhile
    for work in search.state().open.values():
        trial = experiment.trial(work.trial)
        trial.create()  # its worker may not have created the folder yet
        request_stop(trial.stop, attempt=None, reason=reason, source=getpass.getuser())


def withdraw_jobs_left(experiment: ExperimentFolder) -> None:
    """Remove waiting jobs that are left if an earlier `cancel` or `kill` was itself killed; called before deletion."""
    view = ExperimentView(experiment)
    if view.settled() is ExperimentState.CANCELED:
        try:
            _withdraw_jobs(view)
        except CommandError as error:
            say(f"note: jobs of experiment {experiment.id} may be left in the queue: {error}")


def _withdraw_jobs(view: ExperimentView) -> None:
    """Remove the experiment's waiting jobs from the queue. Running jobs are not touched: they exit after saving."""
    view.look()
    for job in view.jobs[:1]:  # all jobs of an experiment have the same scheduler
        scheduler = schedulers.scheduler(job.scheduler)
        for job_id in _left(scheduler, view.job_ids()):
            try:
                scheduler.withdraw(job_id, run_command)
            except CommandError as error:  # not fatal: the stop requests of the trials are already written
                say(
                    f"note: job {job_id} could not be removed from the queue and will end as soon as it starts: {error}"
                )


def _cancel_jobs(view: ExperimentView) -> None:
    """Cancel all jobs of the experiment and wait until the scheduler reports that they have ended.

    Raises HpcDetError if a job has not ended after KILL_WAIT_S seconds.
    """
    view.look()
    if not view.jobs and not view.submitter:
        return
    name = view.plan().scheduler
    scheduler, job_ids = schedulers.scheduler(name), view.job_ids()
    if view.submitter:  # the scheduler may have a job whose id is not on disk yet
        job_ids += unknown_jobs(view.folder, name)
    # A run outside a job would save after SIGTERM; it ends itself when it reads the stop request of its trial.
    for job_id in () if view.is_local else _left(scheduler, job_ids):
        scheduler.cancel(job_id, run_command)
    end = time.monotonic() + KILL_WAIT_S
    while left := _left(scheduler, job_ids):
        if time.monotonic() > end:
            raise HpcDetError(
                f"experiment {view.id}: its job {next(iter(left))} was cancelled but has not ended after "
                f"{KILL_WAIT_S:.0f} s; check again with `hpc-det experiment describe {view.id}`"
            )
        time.sleep(max(POLL_S, ask_every_s(scheduler)))
        with suppress(CommandError):  # Slurm 22.05 requeues a job that is cancelled while it starts (measured)
            for job_id in (job_id for job_id, state in left.items() if state in (JobState.QUEUED, JobState.HELD)):
                scheduler.withdraw(job_id, run_command)


def _collect_checkpoints(experiment: ExperimentFolder) -> None:
    """Delete the checkpoints that `checkpoint_storage` does not keep, as the last worker does if there is one."""
    try:
        collect(experiment)
    except (HpcDetError, OSError) as error:
        say(f"note: some checkpoints that checkpoint_storage does not keep were not deleted: {error}")


def _left(scheduler: Scheduler, job_ids: list[str]) -> dict[str, JobState]:
    """Return the states of the jobs that have not ended. Raises CommandError."""
    statuses = scheduler.status(job_ids, run_command)
    return {job_id: status.state for job_id, status in statuses.items() if status.state is not JobState.ENDED}
