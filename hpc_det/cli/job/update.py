"""hpc-det job update and update-batch: check all operations, apply them in sequence, and undo all if one fails."""

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
@click.option("--priority", metavar="N", help="Set a priority from 1 to 99; lower starts earlier, the default is 42.")
@click.option("--weight", metavar="W", help="Determined's share of a pool; neither Slurm nor PBS supports it.")
@click.option("--resource-pool", metavar="POOL", help="Move jobs of an experiment to this partition or queue.")
@click.option("--ahead-of", metavar="JOB", help="Put the job ahead of this job of yours.")
@click.option("--behind-of", metavar="JOB", help="Put the job behind this job.")
def update(jobs: list[str], **given: str | None) -> None:
    """Change the priority, pool or position of waiting jobs. Give exactly one option.

    If the scheduler refuses, nothing is changed, and the message names who may change it. JOB is the scheduler's ID as
    shown by `hpc-det job list`; the ID of an array selects all of its waiting jobs.

    \b
    Example:
      hpc-det job update 4711 --priority 60
      hpc-det job update 4712 --ahead-of 4711
      hpc-det job update 4711,4712 --resource-pool high
    """
    said = {what.replace("_", "-"): value for what, value in given.items() if value is not None}
    if len(said) != 1:
        many = f"{' and '.join(f'--{what}' for what in said)} exclude each other" if said else "no option was given"
        raise click.UsageError(f"{many}; give one of --priority, --weight, --resource-pool, --ahead-of and --behind-of")
    ((name, value),) = said.items()
    show("\n".join(update_all(at_once(jobs, lambda job_id: operation(job_id, name, value)))))


@click.command("update-batch")
@click.argument("updates", metavar="JOB.OPERATION=VALUE...", nargs=-1, required=True)
def update_batch(updates: tuple[str, ...]) -> None:
    """Change several jobs in sequence: either all changes apply, or none.

    OPERATION is priority, weight, resource-pool, ahead-of or behind-of, like the options of `update`.

    \b
    Example:
      hpc-det job update-batch 4711.priority=60 4712.ahead-of=4711
    """
    show("\n".join(update_all(at_once(updates, parsed))))


def update_all(operations: Sequence[Operation]) -> list[str]:
    """Apply all operations; return a sentence for each, and notes on changes that may have no effect.

    If one fails, undo the changes and raise HpcDetError.
    """
    queue = queue_to_change()
    jobs = queue.jobs(run_command)
    at_once(operations, lambda each: each.check(jobs, queue))  # reports all problems before anything is changed
    done: list[Change] = []
    try:
        made = list(_made(operations, jobs, queue, done))
    except HpcDetError as error:
        raise type(error)([*error.problems, *_put_back(done)]) from None
    except BaseException:  # Ctrl-C must not leave half of the changes in the queue
        _put_back(done)
        raise
    return made + _notes(operations, queue)


def _notes(operations: Sequence[Operation], queue: Queue) -> list[str]:
    """Return each note once; none if the scheduler does not answer."""
    with suppress(CommandError):  # the operations themselves have succeeded
        notes = dict.fromkeys(each.note(queue) for each in operations)
        return [f"Note: {note}" for note in notes if note]
    return []


def _made(
    operations: Sequence[Operation], jobs: Sequence[QueuedJob], queue: Queue, done: list[Change]
) -> Iterator[str]:
    """Apply the operations in sequence and yield a sentence for each.

    The changes that the scheduler accepted are appended to `done`, from which they can be undone.
    """
    for each in operations:
        if each.is_so(jobs):
            yield f"{each} already"
            continue
        for change in each.changes(queue, jobs):
            _run(change, done)
        jobs = queue.jobs(run_command)  # the next operation depends on the queue that this one has left
        if not each.is_so(jobs):
            raise HpcDetError(
                f"{each}: the queue does not show this, although the scheduler accepted {_commands(done)}"
            )
        yield f"{each} now"


def _run(change: Change, done: list[Change]) -> None:
    """Run the command of a change and append it to `done`. Raises HpcDetError, with who may make such changes."""
    try:
        run_command(change.command)
    except CommandError as error:
        if change.may_stop_halfway:  # some elements of an array may have been changed
            done.append(change)
        raise HpcDetError(f"{error}; {change.who_may}") from None
    done.append(change)


def _put_back(done: Sequence[Change]) -> list[str]:
    """Undo the changes, the last one first; return one or more sentences with the result."""
    failed = []
    for change in reversed(done):
        try:
            run_command(change.undo)
        except CommandError as error:
            failed.append(f"{' '.join(change.undo)}: {error}")
    if failed:
        return ["the earlier changes could not be undone:", *failed]
    return ["the earlier changes were undone" if done else "nothing was changed"]


def _commands(done: Sequence[Change]) -> str:
    return ", ".join(f"`{' '.join(change.command)}`" for change in done)


def update_jobs(experiments: Sequence[ExperimentFolder], priority: str) -> list[str]:
    """Set the priority of all waiting jobs of the experiments; return a sentence for each job.

    If one fails, undo the changes and raise HpcDetError.
    """
    views = at_once(experiments, _with_a_queue)
    queue = queue_to_change().jobs(run_command)
    jobs = [job_id for of_one in at_once(views, lambda view: _waiting(view, queue)) for job_id in of_one]
    return update_all(at_once(jobs, lambda job_id: operation(job_id, "priority", priority)))


def _with_a_queue(experiment: ExperimentFolder) -> ExperimentView:
    """Return the experiment's view; raise UsageError if it runs on this machine without a queue."""
    view = ExperimentView(experiment)
    if view.jobs and not schedulers.scheduler(view.jobs[0].scheduler).has_queue:
        raise UsageError(f"experiment {experiment.id}: runs on this machine, where jobs do not wait in a queue")
    return view


def _waiting(view: ExperimentView, queue: Sequence[QueuedJob]) -> list[str]:
    """Return the IDs of the experiment's waiting jobs; raise UsageError if there is none."""
    if found := [job_id for job_id in view.job_ids() if waits(job_id, queue)]:
        return found
    raise UsageError(f"experiment {view.id}: has no waiting job in the queue")
