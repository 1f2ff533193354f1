"""The life of a running job: signals, its walltime, lost nodes; then its end, or its return to the queue."""

from __future__ import annotations

import shutil
import signal
import time

from tests.labs.pbs import arrays, environment, mom, output
from tests.labs.pbs.job import (
    EXITING,
    FAILED,
    FINISHED,
    FIRST_NODE_LOST,
    HELD_BY_USER,
    NODE_LOST,
    OVER_WALLTIME,
    QUEUED,
    REQUEUED,
    RERUNNING,
    RUNNING,
    SISTER_LOST,
    STARTING,
    SUSPENDED,
    TERMINATED,
    Job,
    Task,
)
from tests.labs.pbs.state import Pbs


def ended(pbs: Pbs, pid: int, status: int) -> None:
    """Record the end of a session's leader; PBS ignores other child processes."""
    for job in pbs.on_nodes():
        for task in job.tasks:
            if task.pid == pid and not task.lost:
                task.status = status
                _leader_died(pbs, job, task)


def _leader_died(pbs: Pbs, job: Job, task: Task) -> None:
    """Kill the rest of its session at once, unless TERM was sent: then it has its grace, until `poll` ends that."""
    if task.watcher:
        task.watcher.send(task=task.number, exit=task.status)
    if not job.ending:
        mom.signal_sessions([task.pid], signal.SIGKILL)
        if task is job.top:
            _gone(job)


def _is_empty(job: Job) -> bool:
    """Return whether the first session is empty, in which case PBS kills all other processes of the job."""
    return job.state in "RS" and (job.top.lost or (job.top.status is not None and not mom.members([job.top.pid])))


def _gone(job: Job) -> None:
    mom.signal_sessions(job.sessions(), signal.SIGKILL)
    now = time.time()
    job.gone_at = job.obittime = job.mtime = now
    job.state, job.substate = "E", RERUNNING if job.ending in ("requeue", "lost") else EXITING
    job.exit_status = _exit_status(job)


def _exit_status(job: Job) -> int | None:
    pbs_own = {"requeue": REQUEUED, "walltime": OVER_WALLTIME, "lost": job.lost_status}
    return pbs_own.get(job.ending or "", job.top.status)


def terminate(pbs: Pbs, job: Job, why: str, by: str = "") -> None:
    """Send TERM to the first node only, now; `poll` sends KILL later."""
    if not job.ending:
        now = time.time()
        job.kill_at = now + pbs.queue(job.queue).kill_delay_s + pbs.settings.kill_late_s
        job.next_look = now + pbs.settings.session_poll_s
    job.ending, job.ended_by = why, by
    job.substate = RERUNNING if why == "requeue" else job.substate
    if by:  # also for a qdel by the scheduler: PBS was recorded to run the same request in the scheduler's name
        job.comment = f"{job.comment} and terminated by {by}"
    mom.signal_sessions(job.sessions(first_node_only=True), signal.SIGTERM)
    if job.state == "S":
        resume(job)


def kill(job: Job, by: str) -> None:
    """`qdel -W force`: kill without grace."""
    job.ending, job.ended_by = "delete", by
    job.kill_at = time.time()
    mom.signal_sessions(job.sessions(), signal.SIGKILL)


def suspend(job: Job, substate: int = SUSPENDED) -> None:
    """Stop the job on all nodes, by a signal that cannot be caught."""
    mom.signal_sessions(job.sessions(), signal.SIGSTOP)
    job.state, job.substate, job.suspended_at, job.mtime = "S", substate, time.time(), time.time()


def resume(job: Job) -> None:
    now = time.time()
    job.suspended_s += now - (job.suspended_at or now)
    job.state, job.substate, job.suspended_at, job.mtime = "R", RUNNING, None, now
    job.comment = f"Job run at {time.strftime('%a %b %d at %H:%M', time.localtime(job.stime))} on {job.vnodes}"
    mom.signal_sessions(job.sessions(), signal.SIGCONT)


def lose_node(pbs: Pbs, name: str) -> None:
    for job in pbs.on_nodes():
        if name not in job.nodes or job.state == "E":
            continue
        number = job.nodes.index(name)
        there = [task for task in job.tasks if task.node == number]
        mom.signal_sessions([task.pid for task in there], signal.SIGKILL)
        for task in there:
            task.lost = True
        if job.lost_at is None or not number:
            job.lost_at = time.time()
            job.lost_status = SISTER_LOST if number else FIRST_NODE_LOST


def poll(pbs: Pbs) -> None:
    now = time.time()
    for job in pbs.on_nodes():
        if job.state == "E":
            _leave_exiting(pbs, job, now)
        else:
            _poll_running(pbs, job, now)


def _leave_exiting(pbs: Pbs, job: Job, now: float) -> None:
    if pbs.answers and now >= (job.gone_at or 0) + pbs.settings.exiting_s:
        finish(pbs, job)


def _poll_running(pbs: Pbs, job: Job, now: float) -> None:
    if job.substate == STARTING:
        job.substate, job.session_id, job.mtime = RUNNING, job.top.pid, now
    if job.lost_at is not None and now >= job.lost_at + _patience_s(pbs, job):
        _give_up_lost(job)
    elif job.ending is None and job.walltime_s is not None and job.state == "R":
        if now >= job.next_look and job.used_walltime_s(now) > job.walltime_s:
            terminate(pbs, job, "walltime")
        elif now >= job.next_look:
            job.next_look = now + pbs.settings.walltime_poll_s
    elif job.ending and now >= job.next_look:
        job.next_look = now + pbs.settings.session_poll_s
        if _is_empty(job):
            _gone(job)
    if job.kill_at is not None and now >= job.kill_at and job.state == "R":
        mom.signal_sessions(job.sessions(first_node_only=True), signal.SIGKILL)


def _patience_s(pbs: Pbs, job: Job) -> float:
    return pbs.settings.node_fail_requeue if job.top.lost else pbs.settings.sister_lost_s


def _give_up_lost(job: Job) -> None:
    job.ending = "lost"
    _gone(job)
    if job.lost_status == FIRST_NODE_LOST:
        job.state, job.substate = "E", NODE_LOST


def finish(pbs: Pbs, job: Job) -> None:
    for node in job.nodes:
        shutil.rmtree(environment.temporary_folder(pbs.site, job, node), ignore_errors=True)
    if job.ending in ("requeue", "lost") and job.rerunnable:
        _back_to_queue(job)
    else:
        _finish_for_good(pbs, job)
    _answer(job)


def _back_to_queue(job: Job) -> None:
    """Requeue with the same ID in the same queue; the next start increases run_count."""
    job.state, job.substate = ("H", HELD_BY_USER) if job.holds else ("Q", QUEUED)
    job.slots, job.tasks, job.ending = [], [], None
    job.stime = job.kill_at = job.gone_at = job.lost_at = job.suspended_at = None
    job.mtime = time.time()


def _finish_for_good(pbs: Pbs, job: Job) -> None:
    verdicts = {"delete": f"and terminated by {job.ended_by}", "walltime": "and exceeded resource walltime"}
    verdict = verdicts.get(job.ending or "", "and finished" if job.exit_status == 0 else "and failed")
    if verdict not in (job.comment or ""):
        job.comment = f"{job.comment} {verdict}"
    job.substate = TERMINATED if job.ending == "delete" else FINISHED if job.exit_status == 0 else FAILED
    output.deliver(pbs.site, job)
    close(job)


def close(job: Job) -> None:
    """Mark the job as done, whether it ever ran or not."""
    job.state, job.mtime = "X" if job.parent else "F", time.time()
    if job.parent:
        arrays.subjob_done(job.parent, job)
    _answer(job)


def _answer(job: Job) -> None:
    """Answer the commands that wait for the end of a run, and, at the end of the job, those that wait for that."""
    for waiter in list(job.waiters):
        if job.is_done or waiter.of_run:
            waiter.connection.send(code=0, exit=job.exit_status)
            job.waiters.remove(waiter)


def delete_waiting(job: Job, by: str) -> None:
    """Delete a job that never ran; it keeps its comment, while a subjob gets another one."""
    job.substate, job.ended_by, job.holds = TERMINATED, by, set()
    if job.parent:
        job.exit_status, job.comment = 1, "Subjob finished"
    elif job.comment:
        job.comment += " and terminated"
    close(job)
