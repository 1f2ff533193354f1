"""Slurm's queue, after squeue(1), scontrol(1) and measurements on Slurm 22.05.

Users lower the priority of their jobs with a positive nice value, and may take that back; a negative one is the
operators'. `scontrol top` is not used: it moves the nice values of all the user's jobs, and leaves negative ones that
the user cannot restore.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from hpc_det.errors import UsageError, printable
from hpc_det.plan.priority import USUAL, from_nice, nice_of
from hpc_det.schedulers.queue import Change, QueuedJob
from hpc_det.schedulers.scheduler import JobState, Run, reading
from hpc_det.schedulers.slurm.answers import REASONS, SQUEUE, STATES, SUSPENDED, indices, local_time
from hpc_det.schedulers.slurm.detect import PARTITIONS, parse_partitions
from hpc_det.schedulers.slurm.scheduler import Slurm

FIELDS = (
    "JobArrayID",
    "Name",
    "UserName",
    "Partition",
    "State",
    "Reason",
    "SubmitTime",
    "StartTime",
    "Nice",
    "PriorityLong",
    "tres-alloc",
    "WorkDir",
)
"""Of squeue --Format."""
_ORDER = ("--noheader", "--priority", "--sort=-p,i")
BY_TIME = "BeginTime"
"""The reason of a job that was requeued, or that was submitted for later."""
LOWEST = 1
"""Of Slurm's priorities; 0 is a hold."""
_OPERATORS = "the site's operators and administrators"


class SlurmQueue:
    @reading("squeue")
    def jobs(self, run: Run, pool: str | None = None) -> list[QueuedJob]:
        """In the order in which Slurm considers jobs (squeue(1), --priority), each once for every partition of its."""
        mark = f"<{os.urandom(8).hex()}>"  # a job's name may hold anything, a newline too
        found = parse_queue(
            run([*SQUEUE, *_ORDER, f"--Format={','.join(f'{field}:{mark}' for field in FIELDS)}"]), mark
        )
        return sorted((job for job in found if not pool or job.pool == pool), key=lambda job: not job.running)

    @reading("scontrol")
    def pools(self, run: Run) -> dict[str, bool]:
        partitions = parse_partitions(run(PARTITIONS))
        return {name: said.get("Default") == "YES" for name, said in partitions.items()}

    def prioritize(self, job: QueuedJob, priority: int) -> list[Change]:
        _place(job)
        return [_renice(job, nice_of(priority))]

    def priority_note(self, run: Run) -> str:
        """Nice values count with priority/basic as with priority/multifactor."""
        return ""

    def move(self, job: QueuedJob, pool: str) -> list[Change]:
        who_may = f"partition {pool!r} may be for other accounts or users, or its limits may be too low for this job"
        return [_update(job, f"Partition={pool}", f"Partition={','.join(job.pools)}", who_may)]

    def put_ahead(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        """The job rises as far as its nice value lets it. Of the same user, `other` and what is between go behind it
        where that is not enough.
        """
        just_ahead = _place(other) + 1
        if other.user != job.user:
            return _brought(job, just_ahead)
        place = min(just_ahead, _highest(job))
        return [*_brought(job, place), *_behind(place, [other, *between])]

    def put_behind(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        return _behind(_place(other), [job])

    def hold(self, job: QueuedJob, run: Run) -> None:
        """A hold of its user's, who can lift it again, even where an operator asks for it."""
        run(["scontrol", "uhold", job.named])

    def release(self, job: QueuedJob, run: Run) -> None:
        if job.reason == BY_TIME:
            Slurm().release(job.named, run)
        else:
            run(["scontrol", "release", job.named])


def parse_queue(output: str, mark: str) -> list[QueuedJob]:
    """The answer to `--Format` with FIELDS, each followed by `mark`."""
    words = [word.removeprefix("\n") for word in output.split(mark)[:-1]]
    rows = [
        dict(zip(FIELDS, words[start : start + len(FIELDS)], strict=True))
        for start in range(0, len(words), len(FIELDS))
    ]
    pools: dict[str, list[str]] = {}
    for row in rows:
        pools.setdefault(row["JobArrayID"], []).append(row["Partition"])
    return [_job(row, tuple(pools[row["JobArrayID"]])) for row in rows]


def _job(row: dict[str, str], pools: tuple[str, ...]) -> QueuedJob:
    job_id, named, count = _elements(row["JobArrayID"])
    state = STATES.get(row["State"], JobState.UNKNOWN)
    if state is JobState.QUEUED and (row["Reason"] == BY_TIME or row["Reason"] in REASONS):
        state = JobState.HELD
    runs = state is JobState.RUNNING
    return QueuedJob(
        job_id=job_id,
        named=named,
        name=printable(row["Name"]),
        user=row["UserName"],
        pool=row["Partition"],
        pools=pools,
        state=state,
        reason="" if row["Reason"] == "None" else printable(row["Reason"]),
        submitted=local_time(row["SubmitTime"]),
        starts=local_time(row["StartTime"]),
        priority=from_nice(int(row["Nice"])),
        scheduler_priority=int(row["PriorityLong"]),
        slots=_slots(row["tres-alloc"]),
        waiting=0 if runs else count,
        running=count if runs else 0,
        path=row["WorkDir"],
        is_suspended=row["State"] in SUSPENDED,
    )


def _elements(array_id: str) -> tuple[str, str, int]:
    """Of `20_[4-6:2,9%2]` array 20, its elements as scontrol takes them, which knows no steps, and their number."""
    job_id, bracket, rest = array_id.partition("_[")
    if not bracket:
        return job_id, job_id, 1
    ranges, listed = rest.partition("%")[0].rstrip("]"), indices(array_id)
    return job_id, f"{job_id}_[{','.join(map(str, listed)) if ':' in ranges else ranges}]", len(listed)


def _slots(tres: str) -> int:
    """GPUs in `cpu=3,mem=24000M,node=3,billing=3,gres/gpu=6`, or CPUs; a site may not track GPUs."""
    found = dict(re.findall(r"(?:^|,)(gres/gpu|cpu)=(\d+)", tres))
    return int(found.get("gres/gpu") or found.get("cpu", 0))


def _place(job: QueuedJob) -> int:
    """Slurm's priority, the higher the earlier. Raises UsageError where a hold has made it 0.

    A nice value given meanwhile would make it 1 or 2 on Slurm 22.05, and `release` would not change that.
    """
    if not job.scheduler_priority:
        raise UsageError(
            f"job {job.job_id}: is held ({job.reason}), and has no place in the queue; let it go first: `hpc-det job "
            f"release {job.job_id}`"
        )
    return job.scheduler_priority


def _highest(job: QueuedJob) -> int:
    """The place that its user can give the job."""
    return _place(job) + max(nice_of(job.priority), 0)


def _brought(job: QueuedJob, to: int) -> list[Change]:
    """To this place, up or down. Raises UsageError at the low end, where Slurm forgets what nice values took off."""
    by = to - _place(job)
    if by and min(to, _place(job) - 1) < LOWEST:
        raise UsageError(
            f"job {job.job_id}: Slurm has no priority below {LOWEST}, so jobs have no order there; raise one first, as "
            f"with `hpc-det job update {job.job_id} --priority {USUAL}`"
        )
    return [_renice(job, nice_of(job.priority) - by)] if by else []


def _behind(place: int, jobs: Sequence[QueuedJob]) -> list[Change]:
    """In this order behind that place, each as little as it has to."""
    changes: list[Change] = []
    for job in jobs:
        place = min(place - 1, _place(job))
        changes += _brought(job, place)
    return changes


def _renice(job: QueuedJob, nice: int) -> Change:
    who_may = f"only its user and {_OPERATORS} may change a job"
    if nice < min(nice_of(job.priority), 0):
        who_may = (
            f"only {_OPERATORS} may put a job ahead of its turn: ask one for `scontrol update JobId={job.named} "
            f"Nice={nice}`, or put jobs of yours behind it"
        )
    return _update(job, f"Nice={nice}", f"Nice={nice_of(job.priority)}", who_may)


def _update(job: QueuedJob, wanted: str, before: str, who_may: str) -> Change:
    update = ("scontrol", "update", f"JobId={job.named}")
    is_array = job.named != job.job_id  # of which an element may end right now
    return Change(command=(*update, wanted), undo=(*update, before), who_may=who_may, may_stop_halfway=is_array)
