"""The parent of an array: it begins with its first subjob, counts the subjobs, and ends with the last."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tests.labs.pbs.job import ARRAY_BEGUN, FAILED, FINISHED, TERMINATED, Job


def subjobs_of(parent: Job) -> list[Job]:
    first, last, step = parent.submission.array or (0, -1, 1)
    return [Job(parent.number, parent.submission, index, parent) for index in range(first, last + 1, step)]


def begin(parent: Job, now: float) -> None:
    if parent.state != "B":
        parent.state, parent.substate, parent.stime = "B", ARRAY_BEGUN, now
        parent.comment = f"Job Array Began at {time.strftime('%a %b %d at %H:%M')}"


def subjob_done(parent: Job, job: Job) -> None:
    parent.exit_status = max(parent.exit_status or 0, 1 if job.exit_status else 0)
    if parent.state == "B" and all(one.is_done for one in parent.subjobs):
        _end(parent)


def _end(parent: Job) -> None:
    now = time.time()
    verdict = "terminated" if parent.ended_by else "failed" if parent.exit_status else "finished"
    parent.state, parent.obittime, parent.mtime = "F", now, now
    parent.substate = {"terminated": TERMINATED, "failed": FAILED, "finished": FINISHED}[verdict]
    parent.comment = f"{parent.comment} and {verdict}"
    for one in parent.subjobs:
        one.state = "F"
    for waiter in parent.waiters:
        waiter.connection.send(code=0, exit=parent.exit_status)


def state_count(parent: Job) -> str:
    """Return the counts of states; `Expired` is 0 once the parent has ended."""
    states = [one.state for one in parent.subjobs]
    numbers = {"Queued": "QHW", "Running": "RS", "Exiting": "E", "Expired": "X"}
    return " ".join(f"{name}:{sum(state in letters for state in states)}" for name, letters in numbers.items())


def remaining(parent: Job) -> str:
    return ranges(one.index for one in parent.subjobs if one.state in "QHW" and one.index is not None) or "-"


def ranges(indices: Iterable[int]) -> str:
    """Return ranges such as `0-3,5`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def submitted(parent: Job) -> str:
    first, last, step = parent.submission.array or (0, 0, 1)
    return f"{first}-{last}" + (f":{step}" if step != 1 else "")
