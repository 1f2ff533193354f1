"""hpc-det job update and update-batch: all is checked first, then done one after the other, or put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

import click

from hpc_det.cli.arguments import jobs_argument
from hpc_det.cli.job.list import queue_to_change, waits
from hpc_det.cli.job.operations import Operation, operation, parsed
from hpc_det.cli.output import at_once, show
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.schedulers import scheduler as schedulers
from hpc_det.schedulers.queue import Change, Queue, QueuedJob
from hpc_det.schedulers.scheduler import CommandError, run_command
from hpc_det.store.folders import ExperimentFolder
from hpc_det.view.state import ExperimentView


@click.command("update")
@jobs_argument
@click.option("--priority", metavar="N", help="From 1 to 99, lower is earlier; 42 where nobody asked for another.")
@click.option("--weight", metavar="W", help="Determined's share of a pool.")
@click.option("--resource-pool", metavar="POOL", help="Another partition or queue; for experiments alone.")
@click.option("--ahead-of", metavar="JOB", help="Ahead of this job of yours.")
@click.option("--behind-of", metavar="JOB", help="Behind this job.")
def update(jobs: list[str], **given: str | None) -> None:
    """Change the places of jobs that wait. Give one of the options.

    Where the scheduler refuses, nothing is changed, and a sentence says who may. JOB is the scheduler's id, as
    `hpc-det job list` shows it; an array's id is all of its jobs that wait.

    \b
    Example:
      hpc-det job update 4711 --priority 60
      hpc-det job update 4712 --ahead-of 4711
      hpc-det job update 4711,4712 --resource-pool high
    """
    said = {what.replace("_", "-"): value for what, value in given.items() if value is not None}
    if len(said) != 1:
        many = f"{' and '.join(f'--{what}' for what in said)} exclude each other" if said else "none was given"
        raise click.UsageError(f"{many}; give one of --priority, --weight, --resource-pool, --ahead-of and --behind-of")
    ((name, value),) = said.items()
    show("\n".join(update_all(at_once(jobs, lambda job_id: operation(job_id, name, value)))))


@click.command("update-batch")
@click.argument("updates", metavar="JOB.OPERATION=VALUE...", nargs=-1, required=True)
def update_batch(updates: tuple[str, ...]) -> None:
    """Change several jobs, one after the other: all or nothing.

    OPERATION is priority, weight, resource-pool, ahead-of or behind-of, as the options of `update`.

    \b
    Example:
      hpc-det job update-batch 4711.priority=60 4712.ahead-of=4711
    """
    show("\n".join(update_all(at_once(updates, parsed))))


def update_all(operations: Sequence[Operation]) -> list[str]:
    """What is so now, a sentence each, and what has no effect. Raises HpcDetError, with the queue as it was before."""
    queue = queue_to_change()
    jobs = queue.jobs(run_command)
    at_once(operations, lambda each: each.check(jobs, queue))
    done: list[Change] = []
    try:
        made = list(_made(operations, jobs, queue, done))
    except HpcDetError as error:
        raise type(error)([*error.problems, *_put_back(done)]) from None
    except BaseException:  # Ctrl-C
        _put_back(done)
        raise
    return made + _notes(operations, queue)


def _notes(operations: Sequence[Operation], queue: Queue) -> list[str]:
    """Each once."""
    with suppress(CommandError):
        notes = dict.fromkeys(each.note(queue) for each in operations)
        return [f"Note: {note}" for note in notes if note]
    return []


def _made(
    operations: Sequence[Operation], jobs: Sequence[QueuedJob], queue: Queue, done: list[Change]
) -> Iterator[str]:
    """One after the other, each in the queue that the one before has left; `done` gets what the scheduler took."""
    for each in operations:
        if each.is_so(jobs):
            yield f"{each} already"
            continue
        for change in each.changes(queue, jobs):
            _run(change, done)
        jobs = queue.jobs(run_command)
        if not each.is_so(jobs):
            raise HpcDetError(f"{each}: not so, although the scheduler took {_commands(done)}")
        yield f"{each} now"


def _run(change: Change, done: list[Change]) -> None:
    try:
        run_command(change.command)
    except CommandError as error:
        if change.may_stop_halfway:
            done.append(change)
        raise HpcDetError(f"{error}; {change.who_may}") from None
    done.append(change)


def _put_back(done: Sequence[Change]) -> list[str]:
    """The last first; what came of it, in a sentence."""
    failed = []
    for change in reversed(done):
        try:
            run_command(change.undo)
        except CommandError as error:
            failed.append(f"{' '.join(change.undo)}: {error}")
    if failed:
        return ["what was changed before could not be put back:", *failed]
    return ["what was changed before is put back" if done else "nothing was changed"]


def _commands(done: Sequence[Change]) -> str:
    return ", ".join(f"`{' '.join(change.command)}`" for change in done)


def update_jobs(experiments: Sequence[ExperimentFolder], priority: str) -> list[str]:
    """What is so now, a sentence each. Raises HpcDetError, with the queue as it was before."""
    views = at_once(experiments, _with_a_queue)
    queue = queue_to_change().jobs(run_command)
    jobs = [job_id for of_one in at_once(views, lambda view: _waiting(view, queue)) for job_id in of_one]
    return update_all(at_once(jobs, lambda job_id: operation(job_id, "priority", priority)))


def _with_a_queue(experiment: ExperimentFolder) -> ExperimentView:
    """Raises UsageError for an experiment of this machine alone."""
    view = ExperimentView(experiment)
    if view.jobs and not schedulers.scheduler(view.jobs[0].scheduler).has_queue:
        raise UsageError(f"experiment {experiment.id}: runs on this machine, where no job waits in a queue")
    return view


def _waiting(view: ExperimentView, queue: Sequence[QueuedJob]) -> list[str]:
    """Those that the scheduler has still to start. Raises UsageError where there is none."""
    if found := [job_id for job_id in view.job_ids() if waits(job_id, queue)]:
        return found
    raise UsageError(f"experiment {view.id}: has no job that waits in the queue")
