"""What a task knows of itself, and how it asks to be started again."""

from __future__ import annotations

import os
import signal

from submitit.core import job_environment, logger
from submitit.core.utils import DelayedSubmission, JobPaths

from hpc_det.node.files import write_atomic
from hpc_det.schedulers.pbs.hosts import hosts_in
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths, Reason


class PbsJobEnvironment(job_environment.JobEnvironment):
    """`raw_job_id` is the job of PBS that runs now, `job_id` the one that a program knows."""

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
        super()._handle_signals(paths, submission)
        handler = _SignalHandler(self, paths, submission)
        signal.signal(self._usr_sig(), handler.checkpoint_and_try_requeue)
        if self.global_rank == 0:
            write_atomic(self.paths.ready, str(os.getpid()))

    def _requeue(self, countdown: int) -> None:
        """The job's first process does it, which knows whether PBS itself will run the job again."""
        self.paths.requeue.touch()
        logger.get_logger().info(f"Asked to go on in another job ({countdown} remaining timeouts)")


class _SignalHandler(job_environment.SignalHandler):
    def has_timed_out(self) -> bool:
        """As the job's first process says: submitit's guess takes any job below ten minutes for one at its limit."""
        stop = PbsJobPaths(self._job_paths.folder, job_id=self._job_paths.job_id).stop
        return stop.read_text() == Reason.TIME_LIMIT.value if stop.exists() else super().has_timed_out()
