"""The server's answers: the attributes of jobs as qstat prints them, in its order; queues, nodes, server."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tests.labs.pbs import arrays, dependencies, output
from tests.labs.pbs.job import EXITING, RUNNING, Job
from tests.labs.pbs.resources import Refused, clock
from tests.labs.pbs.site import LOGIN_HOST, SERVER
from tests.labs.pbs.state import UNKNOWN_JOB, UNKNOWN_QUEUE, Node, Pbs

FINISHED = 35
NO_HISTORY = "PBS is not configured to maintain job history"
Attributes = dict[str, Any]


def jobs(pbs: Pbs, ids: list[str], history: bool, subjobs: bool) -> dict[str, Any]:
    """Return all known jobs, and an error `[exit code, text]` for each unknown ID."""
    found: dict[str, Attributes] = {}
    errors: list[tuple[int, str]] = []
    home = str(pbs.site.user_home)
    no_history = history and not pbs.settings.job_history_enable
    for job_id in ids or [""] * no_history:
        try:
            for job in _family(_one(pbs, job_id, history), subjobs):
                found[job.id] = attributes(job, home)
        except Refused as refusal:
            errors.append((0, f"{NO_HISTORY} {job_id}") if no_history else (refusal.code, refusal.text))
    if not ids and not no_history:
        known = [job for job in pbs.jobs.values() if not job.parent and (history or job.state != "F")]
        known.sort(key=lambda job: job.rank)  # in the order that qorder changes
        found = {job.id: attributes(job, home) for first in known for job in _family(first, subjobs)}
    return {"code": 0, "jobs": found, "errors": errors}


def _one(pbs: Pbs, job_id: str, history: bool) -> Job:
    if not re.match(r"\d", job_id):
        raise Refused(UNKNOWN_QUEUE, f"Unknown queue destination {job_id}")
    if job_id not in pbs.jobs:
        raise Refused(UNKNOWN_JOB, f"Unknown Job Id {job_id}")
    job = pbs.jobs[job_id]
    if job.state == "F" and not history:
        raise Refused(FINISHED, f"{job_id} Job has finished, use -x or -H to obtain historical job information")
    return job


def _family(job: Job, subjobs: bool) -> list[Job]:
    return [job, *job.subjobs] if subjobs else [job]


def date(moment: float | None) -> str | None:
    return None if moment is None else time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(moment))


def attributes(job: Job, jobdir: str) -> Attributes:
    """Return the attributes in the recorded order, without those that are None."""
    waits_in_array = job.parent and not job.run_count and not job.is_done
    shown = _of_waiting_subjob(job) if waits_in_array else _of_job(job, jobdir)
    return {name: value for name, value in shown.items() if value is not None}


def _of_job(job: Job, jobdir: str) -> Attributes:
    out, err = output.shown_paths(job)
    ran = job.run_count > 0 and bool(job.slots)
    own = not (job.parent and job.run_count)  # attributes that a subjob does not show once it has run
    return {
        "Job_Name": job.name,
        "Job_Owner": job.submission.owner,
        "resources_used": _used(job) if ran and job.substate >= RUNNING else None,
        "job_state": job.state,
        "queue": job.queue,
        "server": SERVER,
        "Checkpoint": "u" if own else None,
        "ctime": date(job.ctime),
        "depend": dependencies.shown(job),
        "Error_Path": err,
        "exec_host": "+".join(slot.host for slot in job.slots) or None,
        "exec_vnode": job.vnodes,
        "Execution_Time": date(job.execution_time) if job.state == "W" else None,
        "Hold_Types": ("".join(sorted(job.holds, reverse=True)) or "n") if own else None,
        "Join_Path": job.submission.join,
        "Keep_Files": job.submission.keep,
        "Mail_Points": "a",
        "mtime": date(job.mtime),
        "Output_Path": out,
        "Priority": job.priority,
        "qtime": date(job.ctime),
        "Rerunable": str(job.rerunnable),
        "Resource_List": job.resources,
        "stime": date(job.stime),
        "obittime": date(job.obittime),
        "Account_Name": job.submission.account,
        "session_id": job.session_id if job.substate >= RUNNING or job.run_count else None,
        "jobdir": jobdir if ran else None,
        "substate": job.substate,
        "Variable_List": _variables(job),
        "comment": job.comment,
        "etime": date(job.etime),
        "run_count": job.run_count or None,
        "Stageout_status": 1 if job.substate >= EXITING and job.exit_status is not None and job.is_done else None,
        "Exit_status": job.exit_status,
        "Submit_arguments": job.submission.arguments if own else None,
        **_program(job),
        **_array(job),
        "history_timestamp": int(job.mtime) if job.is_done else None,
        "project": job.submission.project,
        "Submit_Host": LOGIN_HOST,
        "max_run_subjobs": job.submission.max_run_subjobs if job.is_array else None,
    }


def _of_waiting_subjob(job: Job) -> Attributes:
    """Return the parent's attributes, with the subjob's own state, and without those that only a separate job has."""
    assert job.parent
    not_shown = {"array", "array_state_count", "array_indices_submitted", "array_indices_remaining"}
    not_shown |= {"max_run_subjobs", "project", "Submit_Host"}
    shown = {name: value for name, value in _of_job(job.parent, "").items() if name not in not_shown}
    return shown | {"job_state": job.state, "substate": job.substate}


def _used(job: Job) -> Attributes:
    return {
        "cpupercent": 0,
        "cput": "00:00:00",
        "mem": "0kb",
        "ncpus": job.resources["ncpus"],
        "vmem": "0kb",
        "walltime": clock(job.used_walltime_s(time.time())),
    }


def _variables(job: Job) -> Attributes:
    shown = {"PBS_O_QUEUE": job.submission.queue, "PBS_O_HOST": LOGIN_HOST}
    return {name: _backslashed(value) for name, value in (job.submission.variables | shown).items()}


def _backslashed(value: str) -> str:
    return value.replace("\\", "\\\\")


def _program(job: Job) -> Attributes:
    if job.submission.argv is None:
        return {}
    words = [html.escape(word).replace("&#x27;", "&apos;") for word in job.submission.argv]
    arguments = "".join(f"<jsdl-hpcpa:Argument>{word}</jsdl-hpcpa:Argument>" for word in words[1:])
    return {
        "executable": f"<jsdl-hpcpa:Executable>{words[0]}</jsdl-hpcpa:Executable>",
        "argument_list": arguments or None,
    }


def _array(job: Job) -> Attributes:
    if job.parent:
        return {"array_id": job.parent.id, "array_index": job.index}
    if not job.is_array:
        return {}
    return {
        "array": "True",
        "array_state_count": arrays.state_count(job) if not job.is_done else _empty_counts(),
        "array_indices_submitted": arrays.submitted(job),
        "array_indices_remaining": arrays.remaining(job),
    }


def _empty_counts() -> str:
    return "Queued:0 Running:0 Exiting:0 Expired:0"


def site(pbs: Pbs) -> dict[str, Any]:
    """Return the content of qstat -Q, qstat -B, pbsnodes and qmgr."""
    current = [job for job in pbs.jobs.values() if not job.parent and job.state != "F"]
    queues = {name: _queue(pbs, name, [job for job in current if job.queue == name]) for name in pbs.settings.queues}
    return {
        "queues": queues,
        "server": _counts(current) | {"resources_assigned": _assigned(pbs, pbs.nodes.values())},
        "nodes": {name: _node(pbs, node) for name, node in pbs.nodes.items()},
        "settings": asdict(pbs.settings),
    }


def _counts(current: list[Job]) -> Attributes:
    letters = {"Transit": "T", "Queued": "Q", "Held": "H", "Waiting": "W", "Running": "R", "Exiting": "E", "Begun": "B"}
    count = "".join(f"{name}:{sum(job.state == letter for job in current)} " for name, letter in letters.items())
    return {"total_jobs": len(current), "state_count": count}


def _queue(pbs: Pbs, name: str, current: list[Job]) -> Attributes:
    settings = pbs.settings.queues[name]
    running = [job for job in pbs.on_nodes() if job.queue == name and job.state != "S"]
    taken = {what: sum(job.resources.get(what, 0) for job in running) for what in ("mpiprocs", "ncpus", "nodect")}
    shown = {
        "queue_type": "Execution",
        "Priority": settings.priority,
        **_counts(current),
        "resources_assigned": {what: number for what, number in taken.items() if number or what != "mpiprocs"},
        "kill_delay": settings.kill_delay,
        "enabled": "True",
        "started": "True",
    }
    return {name: value for name, value in shown.items() if value is not None}


def _assigned(pbs: Pbs, nodes: Iterable[Node]) -> dict[str, int]:
    chunks = [
        slot.chunk for node in nodes for job in pbs.users_of(node.name) for slot in job.slots if slot.node == node.name
    ]
    taken = {name: sum(getattr(chunk, name) for chunk in chunks) for name in ("ncpus", "ngpus")}
    return {name: number for name, number in taken.items() if number}


def _node(pbs: Pbs, node: Node) -> Attributes:
    assigned = _assigned(pbs, [node])
    busy = ["job-busy"] if assigned.get("ncpus", 0) >= pbs.settings.ncpus else []
    users = [job.id for job in pbs.users_of(node.name)]
    shown = {
        "Mom": node.name,
        "ntype": "PBS",
        "state": ",".join(([] if node.up else ["down"]) + busy) or "free",
        "pcpus": 2,
        "jobs": users or None,
        "resources_available": {
            "arch": "linux",
            "host": node.name,
            "mem": "8gb",
            "ncpus": pbs.settings.ncpus,
            "ngpus": pbs.settings.ngpus,
            "vnode": node.name,
        },
        "resources_assigned": assigned,
        "comment": None if node.up else "node down: communication closed",
        "resv_enable": "True",
        "sharing": "default_shared",
        "license": "l",
        "last_state_change_time": int(node.changed),
        "last_used_time": int(node.used),
    }
    return {name: value for name, value in shown.items() if value is not None}
