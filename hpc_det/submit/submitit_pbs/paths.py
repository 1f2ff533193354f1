"""The name of every file that a job on PBS has beside those that submitit gives it."""

from __future__ import annotations

import tempfile
from enum import Enum
from pathlib import Path

from submitit.core.utils import JobPaths


class Reason(Enum):
    """Why a job stops before its tasks are done."""

    PREEMPTED = "preempted"
    """Or deleted, or run again by an operator: PBS sends the same signal."""
    TIME_LIMIT = "time limit"


class PbsJobPaths(JobPaths):
    """All of one job: its tasks, and the jobs that went on for it, share them."""

    @property
    def next(self) -> Path:
        """The jobs of PBS that went on for this one: submitit's form of their ids, a line each."""
        return self._of_job("next")

    def chain(self) -> list[str]:
        """All that ran for this one, in order; the last does now."""
        later = self.next.read_text().split() if self.next.exists() else []
        return [str(self.job_id), *later]

    @property
    def cancelled(self) -> Path:
        """There once the user wants no more of it."""
        return self._of_job("cancelled")

    @property
    def ready(self) -> Path:
        """The pid of task 0, once it takes the signal to stop."""
        return self._of_job("ready")

    @property
    def stop(self) -> Path:
        """Why task 0 is to stop: a `Reason`."""
        return self._of_job("stop")

    @property
    def requeue(self) -> Path:
        """There once task 0 has saved its work and is to be started again."""
        return self._of_job("requeue")

    def new_folder_of_nodes(self) -> Path:
        """A folder to share with the other nodes (hpc_det.schedulers.pbs.hosts) as long as the tasks run. Each run has
        one of its own: the job that goes on may begin before this one has ended.
        """
        return Path(tempfile.mkdtemp(prefix=f"{self._of_job('nodes').name}-", dir=self.folder))

    def folders_of_nodes(self) -> list[Path]:
        """Those that are there."""
        return [*self.folder.glob(f"{self._of_job('nodes').name}-*")]

    def _of_job(self, name: str) -> Path:
        return Path(self._format_id(self.folder / f"%j_{name}"))
