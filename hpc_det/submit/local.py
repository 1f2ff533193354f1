"""This machine, without a scheduler: the job is a process in a session of its own.

A job id is PID-START, the process and its start time in clock ticks (proc(5), /proc/PID/stat field 22), so that another
process with the same number is never taken for the job.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_det.plan.job_plan import JobPlan
from hpc_det.process import is_running, start_ticks
from hpc_det.requeue import Cause
from hpc_det.store.folders import TrialFolder
from hpc_det.submit.command import Run
from hpc_det.submit.scheduler import JobState, JobStatus, agent_command, common_variables


class Local:
    template = "local.sh.j2"
    has_queue = False

    def script_variables(self, plan: JobPlan) -> dict[str, object]:
        return {
            **common_variables(plan),
            "start_agents": agent_command(plan),
            "job_log": shlex.quote(str(TrialFolder(Path(plan.folder)).job_log)),
        }

    def submit_command(self, script: str) -> list[str]:
        return [sys.executable, "-m", "hpc_det.submit.local", script]

    def parse_submit(self, output: str) -> str:
        job_id = output.strip()
        _parts(job_id)
        return job_id

    def status(self, job_ids: Sequence[str], run: Run) -> dict[str, JobStatus]:
        running = {job_id: is_running(*_parts(job_id)) for job_id in job_ids}
        return {job_id: JobStatus(JobState.RUNNING if runs else JobState.ENDED) for job_id, runs in running.items()}

    def cancel(self, job_id: str, run: Run) -> None:
        pid, ticks = _parts(job_id)
        if is_running(pid, ticks):
            with suppress(ProcessLookupError):  # it may end just now
                os.kill(pid, signal.SIGTERM)

    def release(self, job_id: str, run: Run) -> None:
        """Nothing is ever held back here."""

    def job_id(self, env: Mapping[str, str]) -> str:
        return f"{os.getpid()}-{start_ticks(os.getpid())}"

    def node_rank(self, env: Mapping[str, str]) -> int:
        return 0

    def stop_cause(self, plan: JobPlan, env: Mapping[str, str], now: float, run: Run) -> Cause:
        return Cause.PREEMPTED

    def requeue(self, job_id: str, run: Run) -> None:
        raise NotImplementedError("there is no queue")


def start_detached(script: str) -> str:
    """Start `script` in its own session, so that it outlives the shell; its job id."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        ["/bin/bash", script], stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
    )
    return f"{process.pid}-{start_ticks(process.pid)}"


def _parts(job_id: str) -> tuple[int, int]:
    pid, _, ticks = job_id.partition("-")
    return int(pid), int(ticks)


if __name__ == "__main__":
    print(start_detached(sys.argv[1]))
