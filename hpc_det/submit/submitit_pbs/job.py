"""A job as a program holds it."""

from __future__ import annotations

import subprocess
from typing import TypeVar

from submitit.core import core, utils

from hpc_det.submit.submitit_pbs.ids import to_pbs
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths
from hpc_det.submit.submitit_pbs.watcher import PbsInfoWatcher

R = TypeVar("R", covariant=True)
_HAS_ENDED = (35, 153)
"""Exit codes of qdel: finished, unknown."""


class PbsJob(core.Job[R]):
    """Keeps its id, its files and its result, whichever job of PBS runs for it."""

    _cancel_command = "qdel"
    watcher = PbsInfoWatcher()

    def cancel(self, check: bool = True) -> None:
        """No other job goes on for it then. Raises FailedJobError where PBS refuses; one that has ended is fine."""
        paths = self._pbs_paths
        paths.cancelled.touch()
        deleted = ""
        while deleted != (target := paths.chain()[-1]):  # the next may just have been submitted
            done = subprocess.run(["qdel", to_pbs(target)], capture_output=True, text=True)
            if check and done.returncode not in (0, *_HAS_ENDED):
                raise utils.FailedJobError(f"qdel {to_pbs(target)}: {done.stderr.strip()}")
            deleted = target

    def _register_in_watcher(self) -> None:
        if not self._tasks[0]:
            self.watcher.watch(self._pbs_paths)

    @property
    def _pbs_paths(self) -> PbsJobPaths:
        return PbsJobPaths(self.paths.folder, job_id=self.job_id)
