"""When the scheduler takes all nodes of a driver that is in the job itself: it leaves, and the job comes back.

And when a driver that is in no job is sent a TERM: it leaves nothing behind.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

from hpc_det.node.process import exit_code
from hpc_det.schedulers.scheduler import CommandError, Run, run_command
from hpc_det.schedulers.slurm.answers import local_time, shown
from hpc_det.schedulers.slurm.scheduler import Slurm, was_requeued

TEMPORARY = 75
"""sysexits.h, EX_TEMPFAIL: to be tried again."""


class JobLeaves(SystemExit):
    """The training goes on when the program is started again: `with` blocks and `finally` run, and then it ends."""

    def __init__(self) -> None:
        super().__init__(TEMPORARY)


def back_into_queue(env: Mapping[str, str], run: Run = run_command) -> str:
    """What becomes of the job, in words. A job of Slurm's is put back, unless somebody has cancelled it: one that ends
    within its grace time by itself is COMPLETED there (Slurm 22.05, measured).
    """
    if "SLURM_JOB_ID" not in env:
        return "start the program again with the same run, and it goes on"
    job_id = Slurm().job_id(env)
    try:
        job = shown(job_id, run)
        comes_back = local_time(job.get("PreemptTime")) is not None or was_requeued(job, env)
        if not comes_back and job.get("JobState") in ("COMPLETING", "CANCELLED"):
            return f"job {job_id} was cancelled; submit it again with the same run, and it goes on"
        if job.get("Requeue") == "0":
            return f"job {job_id} stays out of the queue, as it was submitted; whoever submitted it may do so again"
        Slurm().requeue(job_id, env, run)
    except CommandError as error:
        return f"job {job_id} could not be requeued: {error}; submit it again with the same run, and it goes on"
    return f"job {job_id} goes back into the queue"


def exit_at_term() -> None:
    """From now on a TERM ends the program as `sys.exit` does, which shuts its trainers down. A handler of the program's
    own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)
        os.register_at_fork(after_in_child=_end_at_term)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(exit_code(-number))


def _end_at_term() -> None:
    """A DataLoader's worker, or another child, has no trainer."""
    if signal.getsignal(signal.SIGTERM) is _exit:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
