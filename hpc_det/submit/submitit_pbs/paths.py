"""The names of all files of a job on PBS beside submitit's own."""

from __future__ import annotations

import tempfile
from enum import Enum
from pathlib import Path

from submitit.core.utils import JobPaths


class Reason(Enum):
    """Reasons for which a job stops before its tasks are complete."""

    PREEMPTED = "preempted"
    """Preempted, deleted, or rerun by an operator: PBS sends the same signal."""
    TIME_LIMIT = "time limit"


class PbsJobPaths(JobPaths):
    """The files of one job, shared by its tasks and by the jobs that continue it."""

    @property
    def next(self) -> Path:
        """Ids of the PBS jobs that continued this one, in submitit's form, one in each line."""
        return self._of_job("next")

    def chain(self) -> list[str]:
        """Return the ids of all jobs that ran this one, in order; the last one runs now."""
        later = self.next.read_text().split() if self.next.exists() else []
        return [str(self.job_id), *later]

    @property
    def cancelled(self) -> Path:
        """Exists after the user has cancelled the job."""
        return self._of_job("cancelled")

    @property
    def ready(self) -> Path:
        """Contains the pid of task 0, after it has installed its signal handler."""
        return self._of_job("ready")

    @property
    def stop(self) -> Path:
        """Contains the `Reason` for which task 0 must stop."""
        return self._of_job("stop")

    @property
    def requeue(self) -> Path:
        """Exists after task 0 has saved its work and asked for another start."""
        return self._of_job("requeue")

    def new_folder_of_nodes(self) -> Path:
        """Create and return a folder to share with the other nodes while the tasks run (hpc_det.schedulers.pbs.hosts).

        Each run has a separate one, since the next job may start before this one has ended.
        """
        return Path(tempfile.mkdtemp(prefix=f"{self._of_job('nodes').name}-", dir=self.folder))

    def folders_of_nodes(self) -> list[Path]:
        """Return the existing folders."""
        return [*self.folder.glob(f"{self._of_job('nodes').name}-*")]

    def _of_job(self, name: str) -> Path:
        return Path(self._format_id(self.folder / f"%j_{name}"))
