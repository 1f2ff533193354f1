"""`-W depend=afterok:12`: which job waits for which, and which jobs are removed because they can never run."""

from __future__ import annotations

import time

from tests.labs.pbs import job_life
from tests.labs.pbs.job import FINISHED, HELD_BY_DEPENDENCY, HELD_BY_USER, QUEUED, Job
from tests.labs.pbs.site import SERVER
from tests.labs.pbs.state import Pbs

SEEN_BY_PARENT = {"after": "before", "afterok": "beforeok", "afternotok": "beforenotok", "afterany": "beforeany"}


def hold(pbs: Pbs, job: Job, depend: list[tuple[str, list[str]]]) -> None:
    job.depend = [(kind, list(parents)) for kind, parents in depend]
    job.holds.add("s")
    job.state, job.substate = "H", HELD_BY_DEPENDENCY
    for kind, parents in job.depend:
        for parent in parents:
            if parent in pbs.jobs and not pbs.jobs[parent].is_done:
                pbs.jobs[parent].dependents.append((SEEN_BY_PARENT[kind], job.id))


def settle(pbs: Pbs) -> None:
    """Release jobs whose dependencies are met; remove jobs whose dependencies can no longer be met."""
    for job in list(pbs.jobs.values()):
        if job.state == "H" and job.depend:
            answers = [_is_met(pbs, kind, parent) for kind, parents in job.depend for parent in parents]
            if False in answers:
                _remove(job)
            elif None not in answers:
                _release(job)


def _is_met(pbs: Pbs, kind: str, parent_id: str) -> bool | None:
    """Return None while undecided. A parent that the server does not know meets no dependency, whatever its kind."""
    parent = pbs.jobs.get(parent_id)
    if parent is None:
        return False
    if kind == "after":
        return True if parent.run_count or parent.is_done else None
    if not parent.is_done:
        return None
    return {"afterany": True, "afterok": parent.exit_status == 0, "afternotok": parent.exit_status != 0}[kind]


def _release(job: Job) -> None:
    job.depend = []
    job.holds.discard("s")
    job.state, job.substate = ("H", HELD_BY_USER) if job.holds else ("Q", QUEUED)
    job.etime = job.mtime = time.time()


def _remove(job: Job) -> None:
    """Remove a job; as recorded, it looks successful except that it has no Exit_status."""
    job.substate = FINISHED
    job_life.close(job)


def shown(job: Job) -> str | None:
    """Return `afterok:12.pbshead@pbshead`, and `beforeok:...` with the jobs that wait for this one."""
    kinds: dict[str, list[str]] = {kind: list(parents) for kind, parents in job.depend}
    for kind in SEEN_BY_PARENT.values():
        if ids := [child for how, child in job.dependents if how == kind]:
            kinds[kind] = ids
    order = ["beforeok", "beforenotok", "beforeany", "before"]
    names = sorted(kinds, key=lambda kind: order.index(kind) if kind in order else -1)
    return ",".join(f"{kind}:" + ":".join(f"{one}@{SERVER}" for one in kinds[kind]) for kind in names) or None
