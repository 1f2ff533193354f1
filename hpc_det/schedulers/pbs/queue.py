"""The queue of PBS, after qstat(1B), qalter(1B), qmove(1B) and qorder(1B), and recordings of OpenPBS 23.06.

The order in which qstat lists jobs is taken as their scheduling order. A formula or sort key of the site may start
others first; users cannot read a sort key. Priorities affect the order only if the formula or key uses them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_det.errors import printable
from hpc_det.plan.priority import from_pbs_priority, pbs_priority_of
from hpc_det.schedulers.pbs.answers import elements_in, holds_of, moment, shown, status_of, waits_for
from hpc_det.schedulers.pbs.detect import QUEUES, SERVER, answer, priority_note
from hpc_det.schedulers.queue import Change, QueuedJob
from hpc_det.schedulers.scheduler import JobState, JobStatus, Run, reading

JOBS = ("qstat", "-f", "-F", "json")
_WHO_MAY = "only a job's user, and the site's operators and managers, may change it"


class PbsQueue:
    """The queue of a PBS server."""

    @reading("qstat")
    def jobs(self, run: Run, pool: str | None = None) -> list[QueuedJob]:
        found = [_job(job_id, job) for job_id, job in answer(run, JOBS).get("Jobs", {}).items()]
        return sorted((job for job in found if not pool or job.pool == pool), key=lambda job: not job.running)

    @reading("qstat")
    def pools(self, run: Run) -> dict[str, bool]:
        servers = answer(run, SERVER).get("Server", {}).values()
        defaults = {server.get("default_queue") for server in servers}
        return {queue: queue in defaults for queue in answer(run, QUEUES).get("Queue", {})}

    def prioritize(self, job: QueuedJob, priority: int) -> list[Change]:
        wanted, before = pbs_priority_of(priority), pbs_priority_of(job.priority)
        return [_change(("qalter", "-p", str(wanted), job.named), ("qalter", "-p", str(before), job.named))]

    @reading("qstat")
    def priority_note(self, run: Run) -> str:
        return priority_note(answer(run, SERVER))

    def move(self, job: QueuedJob, pool: str) -> list[Change]:
        who_may = f"queue {pool!r} may be for other users or groups, or its limits may be too low for this job"
        return [_change(("qmove", pool, job.named), ("qmove", job.pool, job.named), who_may)]

    def put_ahead(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        return _exchanges(job, [*reversed(between), other])

    def put_behind(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        return _exchanges(job, [*between, other])

    def hold(self, job: QueuedJob, run: Run) -> None:
        run(["qhold", job.named])

    def release(self, job: QueuedJob, run: Run) -> None:
        """Release all holds of the job. PBS refuses those that only an operator or manager can release."""
        run(["qrls", "-h", holds_of(shown(job.job_id, run)) or "u", job.named])


def _job(job_id: str, said: Mapping[str, Any]) -> QueuedJob:
    status = status_of(said, job_id)
    is_held = status.state is JobState.QUEUED and holds_of(said)
    state = JobState.HELD if is_held else status.state
    depends = str(said.get("job_state")) == "H" and not is_held
    slots, waiting, running = _slots(said, status)
    return QueuedJob(
        job_id=job_id,
        named=job_id,
        name=printable(str(said.get("Job_Name", ""))),
        user=str(said.get("Job_Owner", "")).partition("@")[0],
        pool=str(said.get("queue", "")),
        pools=(str(said.get("queue", "")),),
        state=state,
        reason=printable(status.reason) if state is not JobState.RUNNING else "",
        submitted=_moment(said.get("ctime")),
        starts=_moment(said.get("stime") or said.get("estimated", {}).get("start_time") or said.get("Execution_Time")),
        priority=from_pbs_priority(int(said.get("Priority", 0))),
        scheduler_priority=int(said["Priority"]) if "Priority" in said else None,
        slots=slots,
        waiting=waiting,
        running=running,
        path=str(said.get("Output_Path", "")).partition(":")[2],
        is_suspended=status.is_suspended,
        waits_for=tuple(waits_for(said)) if depends else (),
    )


def _slots(job: Mapping[str, Any], status: JobStatus) -> tuple[int, int, int]:
    """Return the slots of one job, and the numbers of waiting and running jobs."""
    asks = job.get("Resource_List", {})
    slots = int(asks.get("ngpus") or asks.get("ncpus") or 0)
    if "array_state_count" not in job:
        runs = status.state is JobState.RUNNING
        return slots, int(not runs), int(runs)
    return slots, *elements_in(job)


def _moment(text: Any) -> float | None:
    """Return PBS' local time in seconds since the epoch, or None for any other text."""
    try:
        return moment(str(text))
    except ValueError:
        return None


def _exchanges(job: QueuedJob, others: Sequence[QueuedJob]) -> list[Change]:
    """Return the changes that move the job past all `others`, by swapping places with each in turn."""
    swaps = [("qorder", job.named, other.named) for other in others]
    return [_change(swap, swap) for swap in swaps]


def _change(command: tuple[str, ...], undo: tuple[str, ...], who_may: str = _WHO_MAY) -> Change:
    return Change(command=command, undo=undo, who_may=who_may)
