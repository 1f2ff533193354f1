"""The environment of a task, and its request to be started again."""

from __future__ import annotations

import os
import signal
from types import FrameType

from submitit.core import job_environment, logger
from submitit.core.utils import DelayedSubmission, JobPaths

from hpc_det.node.files import write_atomic
from hpc_det.schedulers.pbs.hosts import hosts_in
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths, Reason


class PbsJobEnvironment(job_environment.JobEnvironment):
    """submitit's environment of a task. `raw_job_id` is the PBS job that runs now, `job_id` the one that a program
    knows.
    """

    _env = {  # noqa: RUF012
        "job_id": "PBS_JOBID",
        "num_tasks": "SUBMITIT_PBS_NTASKS",
        "num_nodes": "SUBMITIT_PBS_NNODES",
        "node": "SUBMITIT_PBS_NODEID",
        "global_rank": "SUBMITIT_PBS_GLOBALID",
        "local_rank": "SUBMITIT_PBS_LOCALID",
    }

    @property
    def paths(self) -> PbsJobPaths:
        return PbsJobPaths(os.environ["SUBMITIT_FOLDER"], job_id=self.job_id, task_id=self.global_rank)

    @property
    def job_id(self) -> str:
        return os.environ["SUBMITIT_PBS_JOB_ID"]

    @property
    def array_job_id(self) -> str | None:
        number, _, index = self.job_id.partition("_")
        return number if index else None

    @property
    def array_task_id(self) -> str | None:
        return self.job_id.partition("_")[2] or None

    @property
    def hostnames(self) -> list[str]:
        return hosts_in(os.environ["PBS_NODEFILE"]) if "PBS_NODEFILE" in os.environ else [self.hostname]

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """Set the handlers.

        TERM and CONT do nothing, since the job's first process acts on them. submitit logs them in the handler, which
        raises RuntimeError (reentrant call) in a task that is printing. Only task 0 saves and exits, as in submitit:
        see `_SavesAndLeaves`.
        """
        for number in (signal.SIGTERM, signal.SIGCONT, self._usr_sig()):
            signal.signal(number, _nothing)
        if self.global_rank == 0:
            signal.signal(self._usr_sig(), _SavesAndLeaves(self, paths, submission).checkpoint_and_try_requeue)
            write_atomic(self.paths.ready, str(os.getpid()))

    def _requeue(self, countdown: int) -> None:
        """Ask the job's first process for another job, since it knows whether PBS will rerun this one."""
        self.paths.requeue.touch()
        logger.get_logger().info(f"Requested another job ({countdown} remaining timeouts)")


def _nothing(signum: int, frame: FrameType | None) -> None:
    """Do nothing, in place of the default action."""


class _SavesAndLeaves(job_environment.SignalHandler):
    """The one handler that does more than set a flag: it saves, asks for another start, and ends the task.

    submitit's contract with a user's function requires this (submitit.core.submission.process_job calls the function in
    the main thread and waits for it):

    - The function may be any function and checks no flag, so only a signal handler can interrupt it.
    - `checkpoint()` reads the object on which the function works, so the function must not run meanwhile: in another
      thread, it would save a changing state.
    - `checkpoint()` is called before the function is left or unwound: an exception first and the save after it would
      run its `finally` and `with` blocks before, and an `except` could keep it running.
    - A task without another start exits by UncompletedJobError in the main thread, which process_job stores as the
      job's result; all others exit by SystemExit, so that the function's `finally` blocks run.
    """

    def has_timed_out(self) -> bool:
        """Return the answer of the job's first process: submitit takes any job below ten minutes for one at
        its limit.
        """
        stop = PbsJobPaths(self._job_paths.folder, job_id=self._job_paths.job_id).stop
        return stop.read_text() == Reason.TIME_LIMIT.value if stop.exists() else super().has_timed_out()
