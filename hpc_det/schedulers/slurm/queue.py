"""The queue of Slurm, after squeue(1), scontrol(1) and measurements on Slurm 22.05.

Users lower the priority of their jobs with a positive nice value, and may reset it; only operators can set a negative
one. `scontrol top` is not used: it changes the nice values of all jobs of the user, and leaves negative ones, which the
user cannot restore.
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
    "Dependency",
)
"""The fields that squeue --Format prints."""
_ORDER = ("--noheader", "--priority", "--sort=-p,i")
BY_TIME = "BeginTime"
"""Slurm's reason for a job that was requeued, or that was submitted with a later start time."""
DEPENDENCY = "Dependency"
"""Slurm's reason for a job that waits for another job."""
LOWEST = 1
"""The lowest of Slurm's priorities for a job that is not held; 0 means held."""
_OPERATORS = "the site's operators and administrators"


class SlurmQueue:
    """The queue of Slurm."""

    @reading("squeue")
    def jobs(self, run: Run, pool: str | None = None) -> list[QueuedJob]:
        """Return the jobs in the order in which Slurm considers them (squeue(1), --priority), once per partition of
        each job.
        """
        mark = f"<{os.urandom(8).hex()}>"  # a job's name may contain any text, even a newline
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
        """Return "": nice values affect the order with both priority/basic and priority/multifactor."""
        return ""

    def move(self, job: QueuedJob, pool: str) -> list[Change]:
        who_may = f"partition {pool!r} may be for other accounts or users, or its limits may be too low for this job"
        return [_update(job, f"Partition={pool}", f"Partition={','.join(job.pools)}", who_may)]

    def put_ahead(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        """Return the changes that move `job` directly ahead of `other`.

        The job rises to at most the priority that it has without a nice value. If that is too low and both jobs have
        the same user, `other` and the jobs between are moved behind it.
        """
        just_ahead = _place(other) + 1
        if other.user != job.user:
            return _brought(job, just_ahead)
        place = min(just_ahead, _highest(job))
        return [*_brought(job, place), *_behind(place, [other, *between])]

    def put_behind(self, job: QueuedJob, other: QueuedJob, between: Sequence[QueuedJob]) -> list[Change]:
        return _behind(_place(other), [job])

    def hold(self, job: QueuedJob, run: Run) -> None:
        """Hold the job as its user, who can then release it even if an operator placed the hold."""
        run(["scontrol", "uhold", job.named])

    def release(self, job: QueuedJob, run: Run) -> None:
        if job.reason == BY_TIME:
            Slurm().release(job.named, run)
        else:
            run(["scontrol", "release", job.named])


def parse_queue(output: str, mark: str) -> list[QueuedJob]:
    """Return the jobs in the output of `--Format` with FIELDS, in which `mark` follows each field."""
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
        waits_for=_waits_for(row["Dependency"]) if row["Reason"] == DEPENDENCY else (),
    )


def _waits_for(dependency: str) -> tuple[str, ...]:
    """Return the job ids in a text such as `afterany:20(unfulfilled),afterok:21_*(unfulfilled):22+5(unfulfilled)`."""
    lists = re.findall(r"\bafter\w*((?::[^:,?]+)+)", dependency)
    return tuple(job for jobs in lists for job in re.findall(r":(\d+(?:_\d+)?)", jobs))


def _elements(array_id: str) -> tuple[str, str, int]:
    """Return the job id, the id for scontrol, and the number of jobs.

    For `20_[4-6:2,9%2]`: `20`, `20_[4,6,9]` since scontrol does not accept steps, and 3.
    """
    job_id, bracket, rest = array_id.partition("_[")
    if not bracket:
        return job_id, job_id, 1
    ranges, listed = rest.partition("%")[0].rstrip("]"), indices(array_id)
    return job_id, f"{job_id}_[{','.join(map(str, listed)) if ':' in ranges else ranges}]", len(listed)


def _slots(tres: str) -> int:
    """Return the GPUs in a text such as `cpu=3,mem=24000M,node=3,billing=3,gres/gpu=6`, or the CPUs without GPUs."""
    # A site may not track GPUs as a trackable resource (AccountingStorageTRES); its jobs then show CPUs only.
    found = dict(re.findall(r"(?:^|,)(gres/gpu|cpu)=(\d+)", tres))
    return int(found.get("gres/gpu") or found.get("cpu", 0))


def _place(job: QueuedJob) -> int:
    """Return Slurm's priority of the job: higher is earlier. Raises UsageError if the job is held."""
    # A hold sets the priority to 0. On Slurm 22.05, a new nice value would make it 1 or 2, which `release` does not
    # correct.
    if not job.scheduler_priority:
        raise UsageError(
            f"job {job.job_id}: is held ({job.reason}) and has no place in the queue; release it first: `hpc-det job "
            f"release {job.job_id}`"
        )
    return job.scheduler_priority


def _highest(job: QueuedJob) -> int:
    """Return the highest priority that the user can give the job."""
    return _place(job) + max(nice_of(job.priority), 0)


def _brought(job: QueuedJob, to: int) -> list[Change]:
    """Return the changes that give the job the priority `to`. Raises UsageError if it is too low for Slurm."""
    by = to - _place(job)
    # Slurm cuts priorities off at the lowest one and forgets the rest of the nice value, so jobs there have no order.
    if by and min(to, _place(job) - 1) < LOWEST:
        raise UsageError(
            f"job {job.job_id}: Slurm has no priority below {LOWEST}, and jobs at {LOWEST} have no order; raise this "
            f"job first, for example with `hpc-det job update {job.job_id} --priority {USUAL}`"
        )
    return [_renice(job, nice_of(job.priority) - by)] if by else []


def _behind(place: int, jobs: Sequence[QueuedJob]) -> list[Change]:
    """Return the changes that move the jobs, in this order, behind priority `place`, each no further than necessary."""
    changes: list[Change] = []
    for job in jobs:
        place = min(place - 1, _place(job))
        changes += _brought(job, place)
    return changes


def _renice(job: QueuedJob, nice: int) -> Change:
    who_may = f"only its user and {_OPERATORS} may change a job"
    if nice < min(nice_of(job.priority), 0):
        who_may = (
            f"only {_OPERATORS} may move a job ahead of others: ask one for `scontrol update JobId={job.named} "
            f"Nice={nice}`, or move your own jobs behind it"
        )
    return _update(job, f"Nice={nice}", f"Nice={nice_of(job.priority)}", who_may)


def _update(job: QueuedJob, wanted: str, before: str, who_may: str) -> Change:
    update = ("scontrol", "update", f"JobId={job.named}")
    is_array = job.named != job.job_id  # an element may end before the command runs
    return Change(command=(*update, wanted), undo=(*update, before), who_may=who_may, may_stop_halfway=is_array)
