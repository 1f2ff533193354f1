"""hpc-det experiment pause, cancel and kill: stop the trials and jobs of experiments."""

from __future__ import annotations

import getpass
import time
from contextlib import suppress

import click

from hpc_det.checkpoint.storage import collect
from hpc_det.cli.arguments import experiments_argument
from hpc_det.cli.output import each
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.notify.change import tell_rest
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.own_jobs import unknown_jobs
from hpc_det.schedulers.scheduler import CommandError, JobState, Scheduler, run_command
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import Reason, request_stop
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from hpc_det.view.state import ExperimentState, ExperimentView
from hpc_det.view.trials import state_now
from hpc_det.view.watch import POLL_S, ask_every_s, say, state


@click.command()
@experiments_argument
def pause(experiments: list[ExperimentFolder]) -> None:
    """Have the trials of experiments save, and free their nodes until `activate`.

    \b
    Example:
      hpc-det experiment pause 13
    """
    each(experiments, pause_one)


@click.command()
@experiments_argument
def cancel(experiments: list[ExperimentFolder]) -> None:
    """Save a checkpoint of each trial, then end the experiments.

    \b
    Example:
      hpc-det experiment cancel 13
    """
    each(experiments, cancel_one)


@click.command()
@experiments_argument
def kill(experiments: list[ExperimentFolder]) -> None:
    """End experiments now, with all their trials and jobs, without another checkpoint.

    \b
    Example:
      hpc-det experiment kill 13,14
    """
    each(experiments, kill_one, side_by_side=8)  # most of it is waiting until the jobs are gone


KILL_WAIT_S = 40.0
"""Slurm itself waits KillWait, 30 s by default, between TERM and KILL (slurm.conf(5))."""


def pause_one(experiment: ExperimentFolder) -> str:
    """Have the trials of an experiment save and leave their nodes, until `activate`; what was done, in a sentence.

    Raises UsageError where it has ended already.
    """
    view = ExperimentView(experiment)
    search = _still_there(view)
    if not (former := view.search.paused):
        search.pause(getpass.getuser())
    _stop_trials(experiment, search, "pause")  # once more, where that came to no end
    _withdraw_jobs(view)
    _tell_hooks(experiment)
    if former:
        return f"Experiment {experiment.id} was paused before, by {former}"
    return f"Paused experiment {experiment.id}; go on with `hpc-det experiment activate {experiment.id}`"


def cancel_one(experiment: ExperimentFolder) -> str:
    """Have the trials of an experiment save and end; what was done, in a sentence.

    Raises UsageError where it has ended already.
    """
    view = ExperimentView(experiment)
    if finished := _end_jobs_left(view):
        return finished
    search = _still_there(view)
    search.cancel(getpass.getuser())
    _stop_trials(experiment, search, "cancel")
    _withdraw_jobs(view)
    _tell_hooks(experiment)
    if state(view).is_final:
        _collect_checkpoints(experiment)
    return f"Canceled experiment {experiment.id}: its trials save and end"


def kill_one(experiment: ExperimentFolder) -> str:
    """End all trials and jobs of the experiment without saving; what came of it, in a sentence.

    Raises UsageError where it has ended already, HpcDetError where it does not end.
    """
    view = ExperimentView(experiment)
    if finished := _end_jobs_left(view):
        return finished
    search = _still_there(view)
    search.cancel(getpass.getuser())
    _stop_trials(experiment, search, "kill")
    _cancel_jobs(view)
    for worker, job in tuple(search.state().present.items()):
        search.lose(worker, job)
    _tell_hooks(experiment)
    found = view.state([])
    if found is ExperimentState.CANCELED:
        _collect_checkpoints(experiment)
        return f"Killed experiment {experiment.id}"
    return f"Experiment {experiment.id} ended by itself just now: {found.value}"


def kill_trial(trial: TrialFolder) -> str:
    """End one trial, and no other; what was done, in a sentence. Raises UsageError where nobody has it to train."""
    experiment = trial.experiment()
    name = f"{experiment.id}/{trial.id}"
    view = ExperimentView(experiment)
    search = _still_there(view)
    if trial.id not in {work.trial for work in search.state().open.values()}:
        found = state_now(view.search, trial, is_over=False)
        if found.is_final:
            raise UsageError(f"trial {name} has ended already: {found.value}")
        raise UsageError(
            f"trial {name} is {found.value}: nobody trains it, and the search may never want it again; "
            f"`hpc-det experiment kill {experiment.id}` ends them all"
        )
    trial.create()  # its worker may be about to
    request_stop(trial.stop, attempt=None, reason="kill", source=getpass.getuser())
    return f"Killed trial {name}: it ends without another checkpoint"


def _still_there(view: ExperimentView) -> SearchJournal:
    """Return the search of the experiment, to write in. Raises UsageError where it has ended."""
    if (found := state(view)).is_final:
        raise UsageError(f"experiment {view.id} has ended already: {found.value}")
    return SearchJournal(view.folder)


def _end_jobs_left(view: ExperimentView) -> str | None:
    """End the jobs that a `cancel` or `kill` has left in the queue, because it was killed itself; what was done, in a
    sentence, or None where there are none.
    """
    if view.settled() is not ExperimentState.CANCELED or not (left := jobs_left(view)):
        return None
    _cancel_jobs(view)
    return f"Experiment {view.id} was canceled before; ended what was left of it: job {', '.join(left)}"


def jobs_left(view: ExperimentView) -> list[str]:
    """Those that the scheduler still has. Raises CommandError."""
    return [*_left(schedulers.scheduler(view.jobs[0].scheduler), view.job_ids())] if view.jobs else []


def _tell_hooks(experiment: ExperimentFolder) -> None:
    """Where no worker is left that would."""
    for problem in tell_rest(experiment):
        say(f"note: {problem}")


def _stop_trials(experiment: ExperimentFolder, search: SearchJournal, reason: Reason) -> None:
    """Those that somebody has. Nobody gets another one: the search was told before."""
    for work in search.state().open.values():
        trial = experiment.trial(work.trial)
        trial.create()  # its worker may be about to
        request_stop(trial.stop, attempt=None, reason=reason, source=getpass.getuser())


def withdraw_jobs_left(experiment: ExperimentFolder) -> None:
    """What a `cancel` or `kill` that was killed itself has left waiting in the queue; its experiment is deleted now."""
    view = ExperimentView(experiment)
    if view.settled() is ExperimentState.CANCELED:
        try:
            _withdraw_jobs(view)
        except CommandError as error:
            say(f"note: whether jobs of experiment {experiment.id} are left in the queue is unknown: {error}")


def _withdraw_jobs(view: ExperimentView) -> None:
    """What waits in the queue has nothing to do any more. What runs leaves by itself."""
    view.look()
    for job in view.jobs[:1]:
        scheduler = schedulers.scheduler(job.scheduler)
        for job_id in _left(scheduler, view.job_ids()):
            try:
                scheduler.withdraw(job_id, run_command)
            except CommandError as error:  # the trials have been told by now
                say(f"note: job {job_id} was not withdrawn from the queue, and ends as soon as it begins: {error}")


def _cancel_jobs(view: ExperimentView) -> None:
    """Returns when the scheduler says that all jobs are gone."""
    view.look()
    if not view.jobs and not view.submitter:
        return
    name = view.plan().scheduler
    scheduler, job_ids = schedulers.scheduler(name), view.job_ids()
    if view.submitter:  # the scheduler may have a job whose id is not on disk yet
        job_ids += unknown_jobs(view.folder, name)
    for job_id in _left(scheduler, job_ids):
        scheduler.cancel(job_id, run_command)
    end = time.monotonic() + KILL_WAIT_S
    while left := _left(scheduler, job_ids):
        if time.monotonic() > end:
            raise HpcDetError(
                f"experiment {view.id}: told to end, but its job {next(iter(left))} is still there after "
                f"{KILL_WAIT_S:.0f} s; look again with `hpc-det experiment describe {view.id}`"
            )
        time.sleep(max(POLL_S, ask_every_s(scheduler)))
        with suppress(CommandError):  # Slurm 22.05 puts a job back whose start is cut short (measured)
            for job_id in (job_id for job_id, state in left.items() if state in (JobState.QUEUED, JobState.HELD)):
                scheduler.withdraw(job_id, run_command)


def _collect_checkpoints(experiment: ExperimentFolder) -> None:
    """As its last worker does, where one is left."""
    try:
        collect(experiment)
    except (HpcDetError, OSError) as error:
        say(f"note: checkpoints are left that checkpoint_storage does not keep: {error}")


def _left(scheduler: Scheduler, job_ids: list[str]) -> dict[str, JobState]:
    statuses = scheduler.status(job_ids, run_command)
    return {job_id: status.state for job_id, status in statuses.items() if status.state is not JobState.ENDED}
