"""The local machine, without a scheduler: a job is a process that leads its own session. Without a queue, it starts at
once.

A job id is PID-START@HOST. START is the start time of the process in clock ticks (proc(5), /proc/PID/stat field 22), so
that another process with the same PID is never mistaken for the job. HOST is needed because several machines may share
the state folder.
"""

from __future__ import annotations

import os
import pwd
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_det.errors import printable
from hpc_det.node import gpus
from hpc_det.node.process import is_running, start_ticks
from hpc_det.plan.job_plan import JobArray, JobPlan
from hpc_det.plan.priority import USUAL
from hpc_det.requeue import Cause
from hpc_det.schedulers.queue import QueuedJob
from hpc_det.schedulers.scheduler import CommandError, JobState, JobStatus, Run, Submission, run_command
from hpc_det.store.folders import ExperimentFolder, job_log

MODULE = "hpc_det.schedulers.local"
POOL = "local"
"""The name of the only resource pool, for listings that show pools."""
JOB_MODULE = "hpc_det.launch.job"


class Local:
    """The scheduler `local`, which starts every job at once on this machine."""

    template = "local.sh.j2"
    has_queue = False

    def script_variables(self, plan: JobPlan, array: JobArray, script: Path) -> dict[str, object]:
        return {
            "folder": shlex.quote(plan.folder),
            "job_log": shlex.quote(str(job_log(script))),
        }

    def submit_command(self, submission: Submission, run: Run = run_command) -> list[str]:
        # Not in the user's folder: `python -m` puts the working folder first on sys.path, so a module of the user's
        # could replace one that the job needs.
        return ["env", f"--chdir={Path(submission.script).parent}", sys.executable, "-m", MODULE, submission.script]

    def parse_submit(self, output: str, element: int | None = None) -> str:
        return str(JobId.parse(output.strip()))

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        return {job_id: JobId.parse(job_id).status() for job_id in job_ids}

    def cancel(self, job_id: str, run: Run) -> None:
        job = JobId.parse(job_id)
        status = job.status()
        if status.state is JobState.UNKNOWN:
            raise CommandError(f"job {job_id}: {status.reason}; cancel it there")
        if status.state is JobState.RUNNING:
            with suppress(ProcessLookupError):  # the job may have ended since the check
                os.kill(job.pid, signal.SIGTERM)

    def withdraw(self, job_id: str, run: Run) -> None:
        """Do nothing: without a queue, no job waits."""

    def release(self, job_id: str, run: Run) -> None:
        """Do nothing: without a queue, no job is held."""

    def job_id(self, env: Mapping[str, str]) -> str:
        return str(JobId.of(os.getpid()))

    def array_index(self, env: Mapping[str, str]) -> int:
        return 0

    def share(self, plan: JobPlan, place: int) -> dict[str, str]:
        """Return CUDA_VISIBLE_DEVICES for the gang at this place; empty for CPU slots."""
        if plan.slot_type != "gpu":
            return {}
        # Without a scheduler, nothing else divides the GPUs among gangs: those of the shell that submitted the job.
        first, last = place * plan.ranks_per_node, (place + 1) * plan.ranks_per_node
        visible = os.environ.get(gpus.VISIBLE)
        mine = map(str, range(first, last)) if visible is None else gpus.names(visible)[first:last]
        return {gpus.VISIBLE: ",".join(mine)}

    def node_rank(self, env: Mapping[str, str]) -> int:
        return 0

    def hosts(self, env: Mapping[str, str]) -> list[str]:
        return [socket.gethostname()]

    def down_hosts(self, hosts: Sequence[str], run: Run) -> list[str]:
        return []

    def unreached_hosts(self, printed: str) -> list[str]:
        return []

    def was_away(self, printed: str) -> bool:
        return False

    def avoid(self, job_id: str, hosts: Sequence[str], run: Run) -> None:
        """Do nothing: this machine is the only host."""

    def ends_at(self, plan: JobPlan, env: Mapping[str, str], run: Run) -> float | None:
        return None

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], signalled_at: float, run: Run) -> Cause:
        return Cause.PREEMPTED

    def replaced(self, job_id: str, run: Run) -> None:
        """Do nothing: a local job is never requeued."""

    def requeue(self, job_id: str, env: Mapping[str, str], run: Run) -> None:
        raise NotImplementedError("the local machine has no queue to requeue into")


def start_detached(script: str) -> str:
    """Start `script` in its own session, so that it outlives the shell, and return its job id."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        ["/bin/bash", script], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )
    return str(JobId.of(process.pid))


@dataclass(frozen=True)
class JobId:
    """The identity of a process: PID, start time in clock ticks, and host."""

    pid: int
    ticks: int
    host: str

    @classmethod
    def of(cls, pid: int) -> JobId:
        """Return the id of a running process on this machine."""
        return cls(pid, start_ticks(pid), socket.gethostname())

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Return the id that `text` contains. Raises ValueError if it is not of the form PID-START@HOST."""
        process, _, host = text.partition("@")
        pid, _, ticks = process.partition("-")
        return cls(int(pid), int(ticks), host)

    def __str__(self) -> str:
        return f"{self.pid}-{self.ticks}@{self.host}"

    def status(self) -> JobStatus:
        """Return whether the process runs; UNKNOWN on another host."""
        if self.host != socket.gethostname():
            return JobStatus(JobState.UNKNOWN, f"it runs on {self.host}, and only that host knows its state")
        return JobStatus(JobState.RUNNING if is_running(self.pid, self.ticks) else JobState.ENDED)


def jobs() -> list[QueuedJob]:
    """Return the jobs that run on this machine, oldest first.

    Jobs of other users are included only if their files are readable for this user.
    """
    return sorted(_found(), key=lambda job: job.submitted or 0)


def _found() -> Iterator[QueuedJob]:
    """Yield the job of each process in /proc that leads a job."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, ValueError, LookupError, TypeError):  # it may have ended, or not be a job
                yield from _job_of(int(entry.name))


def _job_of(pid: int) -> Iterator[QueuedJob]:
    """Yield the job that process `pid` leads; nothing if it does not lead one.

    Raises OSError, ValueError, LookupError or TypeError if a file is missing, unreadable or not in the expected format.
    """
    words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    if JOB_MODULE not in words or os.getsid(pid) != pid:  # a job leads its session
        return
    owner = os.stat(f"/proc/{pid}").st_uid
    experiment = ExperimentFolder(Path(words[words.index(JOB_MODULE) + 1]))
    # The plan of another user's experiment is private; its owner may publish a copy without secrets.
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
        scheduler_priority=None,
        slots=plan.job_nodes * plan.job_slots_per_node,
        waiting=0,
        running=1,
        path=plan.folder,
    )


def _text_of(path: Path, owner: int) -> str:
    """Return the content of `path`. Raises PermissionError if it is not a regular file that `owner` owns."""
    # Another user's process may name any path on its command line. O_NONBLOCK: opening a FIFO without a writer would
    # block.
    with open(path, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise PermissionError(path)
        return file.read()


def _started(pid: int) -> float:
    """Return the start time of process `pid`, in seconds since the epoch (proc(5), /proc/uptime)."""
    uptime_s = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time() - uptime_s + JobId.of(pid).ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    print(start_detached(sys.argv[1]))
