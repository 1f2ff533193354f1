"""Jobs on this machine without a scheduler, as its processes tell: there is no queue, and nothing waits."""

from __future__ import annotations

import os
import pwd
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpc_det.errors import printable
from hpc_det.plan.job_plan import JobPlan
from hpc_det.plan.priority import USUAL
from hpc_det.schedulers.local.scheduler import JobId
from hpc_det.schedulers.queue import QueuedJob
from hpc_det.schedulers.scheduler import JobState
from hpc_det.store.folders import ExperimentFolder

POOL = "local"
"""What their pool is called where pools are named."""
JOB_MODULE = "hpc_det.launch.job"


def jobs() -> list[QueuedJob]:
    """The oldest first. Those of other users only where their files may be read."""
    return sorted(_found(), key=lambda job: job.submitted or 0)


def _found() -> Iterator[QueuedJob]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, LookupError, TypeError):  # it may end just now, or be none of ours
                yield from _job_of(int(entry.name))


def _job_of(pid: int) -> Iterator[QueuedJob]:
    """Raises what a file raises that is not there, cannot be read, or holds something else."""
    words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    if JOB_MODULE not in words or os.getsid(pid) != pid:  # a job leads its session
        return
    owner = os.stat(f"/proc/{pid}").st_uid
    experiment = ExperimentFolder(Path(words[words.index(JOB_MODULE) + 1]))
    # Of a colleague's experiment there is a copy to read.
    readable = experiment.plan if os.access(experiment.plan, os.R_OK) else experiment.masked / experiment.plan.name
    plan = JobPlan.from_json(_text_of(readable, owner))
    if plan.scheduler != "local":
        return
    started = _started(pid)
    yield QueuedJob(
        job_id=str(JobId.of(pid)),
        named=str(JobId.of(pid)),
        name=printable(plan.name),
        user=pwd.getpwuid(owner).pw_name,
        pool=POOL,
        pools=(POOL,),
        state=JobState.RUNNING,
        reason="",
        submitted=started,
        starts=started,
        priority=USUAL,
        scheduler_priority=0,
        slots=plan.job_nodes * plan.job_slots_per_node,
        waiting=0,
        running=1,
        path=plan.folder,
    )


def _text_of(path: Path, owner: int) -> str:
    """Raises PermissionError for what is no file of the owner's: any process may name any path, such as a FIFO that
    nobody ever writes to.
    """
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise PermissionError(path)
        return file.read()


def _started(pid: int) -> float:
    """In seconds since the epoch (proc(5), /proc/uptime)."""
    uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time() - uptime_s + JobId.of(pid).ticks / os.sysconf("SC_CLK_TCK")
