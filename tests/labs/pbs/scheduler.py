"""One cycle over the queues: which jobs start, resume, or are preempted by a job of higher priority."""

from __future__ import annotations

import time

from tests.labs.pbs import job_life, job_start
from tests.labs.pbs.job import HELD_BY_USER, QUEUED, SUSPENDED_BY_SCHEDULER, Job
from tests.labs.pbs.placement import Rooms, fits_again, place, rooms, take, why_not
from tests.labs.pbs.state import Pbs

BY_SCHEDULER = "Scheduler@pbshead"


def cycle(pbs: Pbs) -> None:
    _wake(pbs)
    free = rooms(pbs)
    for job in sorted((job for job in pbs.jobs.values() if _wants_nodes(job)), key=lambda job: _order(pbs, job)):
        if _run(pbs, job, free) or not _is_express(pbs, job):
            continue
        if _leaving_suffices(pbs, job):
            return  # the nodes that they free are reserved for this job
        if victims := _victims(pbs, job):
            for victim in victims:
                _preempt(pbs, victim)
            _run(pbs, job, rooms(pbs))
            return


def _wake(pbs: Pbs) -> None:
    for job in pbs.jobs.values():
        if job.state == "W" and time.time() >= (job.execution_time or 0):
            job.state, job.substate, job.etime = "Q", QUEUED, time.time()
            if job.holds:
                job.state, job.substate = "H", HELD_BY_USER


def _wants_nodes(job: Job) -> bool:
    if job.parent:
        return job.state == "Q" and _array_may_run(job.parent)
    return (job.state == "Q" and not job.is_array) or job.substate == SUSPENDED_BY_SCHEDULER


def _array_may_run(parent: Job) -> bool:
    limit = parent.submission.max_run_subjobs
    running = sum(one.state in "RSE" for one in parent.subjobs)
    return parent.state in "QB" and not parent.holds and (limit is None or running < limit)


def _order(pbs: Pbs, job: Job) -> tuple[int, bool, float]:
    """Return the sort key: queues by priority; in each, suspended jobs first, then the order of submission."""
    return -_priority(pbs, job), job.state != "S", job.rank


def _priority(pbs: Pbs, job: Job) -> int:
    return pbs.queue(job.queue).priority or 0


def _is_express(pbs: Pbs, job: Job) -> bool:
    return _priority(pbs, job) >= pbs.settings.preempt_queue_prio


def _run(pbs: Pbs, job: Job, free: Rooms) -> bool:
    if not _wants_nodes(job):  # its array already runs as many subjobs as it may
        return False
    if job.state == "S" and fits_again(job, free):
        job_life.resume(job)
        take(free, job, job.slots)
        return True
    if job.state == "Q" and (slots := place(job, free)):
        job_start.start(pbs, job, slots)
        take(free, job, slots)
        return True
    if not job.parent:
        job.comment = why_not(pbs, job, free)
    return False


def _leaving_suffices(pbs: Pbs, job: Job) -> bool:
    return place(job, rooms(pbs, without=[one for one in pbs.on_nodes() if one.ending or one.state == "E"])) is not None


def _victims(pbs: Pbs, job: Job) -> list[Job]:
    """Return as few jobs as make room, the last started first; none if not even all of them would make room."""
    can_go = [one for one in pbs.on_nodes() if one.state == "R" and not one.ending and not _is_express(pbs, one)]
    can_go = sorted((one for one in can_go if _method(pbs, one)), key=lambda one: one.stime or 0, reverse=True)
    leaving = [one for one in pbs.on_nodes() if one.ending or one.state == "E"]
    for number in range(1, len(can_go) + 1):
        if place(job, rooms(pbs, without=[*leaving, *can_go[:number]])):
            return can_go[:number]
    return []


def _method(pbs: Pbs, job: Job) -> str | None:
    """Return the first letter of `preempt_order` that is possible for this job; C has no effect without checkpoint
    scripts.
    """
    can = {"S": True, "R": job.rerunnable, "D": True}
    return next((letter for letter in pbs.settings.preempt_order if can.get(letter)), None)


def _preempt(pbs: Pbs, job: Job) -> None:
    method = _method(pbs, job)
    if method == "S":
        job_life.suspend(job, SUSPENDED_BY_SCHEDULER)
    elif method == "R":
        job_life.terminate(pbs, job, "requeue")
    else:
        job_life.terminate(pbs, job, "delete", BY_SCHEDULER)
