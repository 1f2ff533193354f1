"""hpc-det job update and update-batch: all is checked first, then done one after the other, or put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from hpc_det.cli.job.here import queue_to_change
from hpc_det.cli.job.operations import Operation
from hpc_det.cli.several import at_once
from hpc_det.errors import HpcDetError
from hpc_det.schedulers.queue import Change, Queue, QueuedJob
from hpc_det.schedulers.scheduler import CommandError, run_command


def update(operations: Sequence[Operation]) -> list[str]:
    """What is so now, a sentence each, and what has no effect. Raises HpcDetError, with the queue as it was before."""
    queue = queue_to_change()
    jobs = queue.jobs(run_command)
    at_once(operations, lambda operation: operation.check(jobs, queue))
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
        notes = dict.fromkeys(operation.note(queue) for operation in operations)
        return [f"Note: {note}" for note in notes if note]
    return []


def _made(
    operations: Sequence[Operation], jobs: Sequence[QueuedJob], queue: Queue, done: list[Change]
) -> Iterator[str]:
    """One after the other, each in the queue that the one before has left; `done` gets what the scheduler took."""
    for operation in operations:
        if operation.is_so(jobs):
            yield f"{operation} already"
            continue
        for change in operation.changes(queue, jobs):
            _run(change, done)
        jobs = queue.jobs(run_command)
        if not operation.is_so(jobs):
            raise HpcDetError(f"{operation}: not so, although the scheduler took {_commands(done)}")
        yield f"{operation} now"


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
