"""The requests that commands may send to the PBS server; those to the moms are in mom_requests.py."""

from __future__ import annotations

import signal
import time
from typing import Any

from tests.labs.pbs import arrays, dependencies, job_life, mom, views
from tests.labs.pbs.job import (
    HELD_BY_USER,
    QUEUED,
    SUSPENDED,
    WAITING,
    Job,
    Submission,
    Waiter,
)
from tests.labs.pbs.resources import Refused, resource_list
from tests.labs.pbs.state import Pbs

OVER_LIMIT, FINISHED, UNAUTHORIZED, BAD_SIGNAL, CANNOT_CHANGE, BAD_STATE, NOT_RERUNNABLE = (
    3,
    35,
    159,
    165,
    167,
    168,
    190,
)
MAX_ARRAY_SIZE = 10000
Answer = dict[str, Any]
OK: Answer = {"code": 0}


def submit(pbs: Pbs, peer: Any, request: Answer) -> Answer | None:
    sent = Submission(**request["job"])
    pbs.queue(sent.queue)
    job = Job(pbs.next_number, sent)
    if sent.array:
        first, last, step = sent.array
        if len(range(first, last + 1, step)) > MAX_ARRAY_SIZE:
            raise Refused(OVER_LIMIT, "Array job exceeds server or queue size limit")
        job.subjobs = arrays.subjobs_of(job)
    pbs.next_number += 1
    pbs.add(job)
    _first_state(pbs, job, sent)
    return {"code": 0, "id": job.id}


def _first_state(pbs: Pbs, job: Job, sent: Submission) -> None:
    if sent.held:
        job.holds.add("u")
        job.state, job.substate = "H", HELD_BY_USER
    if sent.execution_time and sent.execution_time > time.time():
        job.state, job.substate = "W", WAITING
    if sent.depend:
        dependencies.hold(pbs, job, sent.depend)
    for one in (job, *job.subjobs):
        one.etime = one.ctime if job.state == "Q" else None


def wait(pbs: Pbs, peer: Any, request: Answer) -> Answer | None:
    """Answer at the job's end."""
    job = pbs.find(request["id"])
    if job.is_done:
        return {"code": 0, "exit": job.exit_status}
    job.waiters.append(Waiter(peer, of_run=False))
    return None


def status(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    return views.jobs(pbs, request["ids"], request["history"], request["subjobs"])


def _live(pbs: Pbs, job_id: str) -> Job:
    job = pbs.find(job_id)
    if job.is_done:
        raise Refused(FINISHED, f"Job has finished {job.id}")
    return job


def delete(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    job = pbs.find(request["id"])
    if job.state == "F" and request["history"]:
        pbs.forget(job)
        return OK
    job, by = _live(pbs, request["id"]), request["by"]
    if job.is_array:
        job.ended_by = by
        for one in job.subjobs:
            _delete_one(pbs, one, by, request["force"])
        if job.state != "B" and not job.is_done:
            job_life.delete_waiting(job, by)
            for one in job.subjobs:
                one.state = "F"
    else:
        _delete_one(pbs, job, by, request["force"])
    return OK


def _delete_one(pbs: Pbs, job: Job, by: str, force: bool) -> None:
    if job.state in "QHW":
        job_life.delete_waiting(job, by)
    elif job.state in "RS":
        if force:
            job_life.kill(job, by)
        elif job.ending != "delete":
            job_life.terminate(pbs, job, "delete", by)


def send_signal(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Signal the first node; `suspend` and `resume` are for managers, and for all nodes."""
    name, job = request["signal"], _live(pbs, request["id"])
    if name in ("suspend", "resume"):
        _for_managers(request)
        if name == "suspend" and job.state == "R":
            job_life.suspend(job, SUSPENDED)
        elif name == "resume" and job.state == "S":
            job_life.resume(job)
        return OK
    number = _signal_number(name, job.id)
    if job.state not in "RS":
        raise Refused(BAD_STATE, f"Request invalid for state of job {job.id}")
    if number:
        mom.signal_sessions(job.sessions(first_node_only=True), number)
    return OK


def _signal_number(name: str, job_id: str) -> int:
    if name.isdecimal():
        return int(name)
    try:
        return signal.Signals["SIG" + name.removeprefix("SIG")]
    except KeyError:
        raise Refused(BAD_SIGNAL, f"Unknown/illegal signal name {job_id}") from None


def _for_managers(request: Answer) -> None:
    if not request["manager"]:
        raise Refused(UNAUTHORIZED, f"Unauthorized Request  {request['id']}")


def rerun(pbs: Pbs, peer: Any, request: Answer) -> Answer | None:
    """Answer when the run has ended."""
    job = _live(pbs, request["id"])
    _for_managers(request)
    if not job.rerunnable:
        raise Refused(NOT_RERUNNABLE, f"job is not rerunnable {job.id}")
    if job.state not in "RS":
        raise Refused(BAD_STATE, f"Request invalid for state of job {job.id}")
    job.waiters.append(Waiter(peer, of_run=True))
    job_life.terminate(pbs, job, "requeue")
    return None


def hold(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Set a hold. A running job continues; the hold takes effect when it is back in the queue."""
    job = _live(pbs, request["id"])
    _may_hold(request)
    job.holds |= set(request["holds"])
    if job.state == "Q":
        job.state, job.substate = "H", HELD_BY_USER
    return OK


def _may_hold(request: Answer) -> None:
    """Check that only managers use the holds of operators and of the system."""
    if set(request["holds"]) & {"o", "s"}:
        _for_managers(request)


def release(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    job = _live(pbs, request["id"])
    _may_hold(request)
    job.holds -= set(request["holds"])
    if job.state == "H" and not job.holds:
        job.state, job.substate, job.etime = "Q", QUEUED, time.time()
    return OK


def alter(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    job, changes = _live(pbs, request["id"]), request["changes"]
    asked = changes.pop("asked", {})
    if job.state in "RSE" and (set(asked) - {"walltime"}):
        name = sorted(set(asked) - {"walltime"})[0]
        raise Refused(CANNOT_CHANGE, f"Cannot modify attribute while job running  Resource_List.{name} {job.id}")
    if asked:
        known = {name: str(job.resources[name]) for name in ("select", "place", "walltime") if name in job.resources}
        job.resources, job.chunks = resource_list(known | asked)
    if "depend" in changes:
        dependencies.hold(pbs, job, changes.pop("depend"))
    for name, value in changes.items():
        setattr(job, name, value)
    job.mtime = time.time()
    return OK


def move(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    pbs.queue(request["queue"])
    job = _live(pbs, request["id"])
    if job.state not in "QHW":
        raise Refused(BAD_STATE, f"Request invalid for state of job {job.id}")
    job.queue, job.rank = request["queue"], time.time()
    return OK


def order(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Swap the places of two jobs."""
    first, second = _live(pbs, request["id"]), _live(pbs, request["other"])
    for job in (first, second):
        if job.state not in "QHW":
            raise Refused(BAD_STATE, f"Request invalid for state of job {job.id}")
    first.rank, second.rank = second.rank, first.rank
    return OK


def site(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    return {"code": 0} | views.site(pbs)


def change(pbs: Pbs, peer: Any, request: Answer) -> Answer:
    """Handle `qmgr -c 'set ...'`."""
    if not request["manager"]:
        raise Refused(UNAUTHORIZED, "Unauthorized Request")
    target = pbs.queue(request["queue"]) if request["queue"] else pbs.settings
    setattr(target, request["name"], request["value"])
    return OK


OF_SERVER = {
    "submit": submit,
    "wait": wait,
    "status": status,
    "delete": delete,
    "signal": send_signal,
    "rerun": rerun,
    "hold": hold,
    "release": release,
    "alter": alter,
    "move": move,
    "order": order,
    "site": site,
    "change": change,
}
