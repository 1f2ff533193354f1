"""A job as the submitting program sees it, and the states of all its jobs, which are queried together."""

from __future__ import annotations

import pickletools
import subprocess
import time
from pathlib import Path
from typing import TypeVar

from submitit.core import core, utils
from submitit.core.logger import get_logger

from hpc_det.schedulers.pbs.answers import ask_elements, to_pbs, word_of
from hpc_det.schedulers.scheduler import run_command
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths

R = TypeVar("R", covariant=True)
_HAS_ENDED = (35, 153)
"""Exit codes of qdel for a finished and for an unknown job."""


class PbsInfoWatcher(core.InfoWatcher):
    """A watcher for all jobs of a program. submitit's base class queries after 2 s, then at growing intervals."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._paths: dict[str, PbsJobPaths] = {}

    def watch(self, paths: PbsJobPaths) -> None:
        self._paths[str(paths.job_id)] = paths
        self.register_job(str(paths.job_id))

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return str(self.get_info(job_id, mode).get("State", "UNKNOWN"))

    def update(self) -> None:
        """Query the state of all jobs; for a job that was continued, of its successor."""
        if not (waiting := self._registered - self._finished):
            return
        self._num_calls += 1
        latest = {job_id: self._latest(job_id) for job_id in waiting}
        answer = ask_elements(latest.values(), run_command)
        if not answer.jobs and not answer.over:
            get_logger().warning(f"qstat gave no answer, the state of jobs may be old: {answer.trouble}")
        for job_id, asked in latest.items():
            if state := word_of(answer, asked):
                self._info_dict[job_id] = {"JobID": asked, "State": self._state(job_id, asked, state)}
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in waiting if self.is_done(job_id, mode="cache")}

    def _latest(self, job_id: str) -> str:
        return self._paths[job_id].chain()[-1] if job_id in self._paths else job_id

    def _state(self, job_id: str, asked: str, state: str) -> str:
        """Return the state. The successor of an ended job is looked up afterwards, since it was recorded before the
        end.
        """
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "ENDED"):
            if self._latest(job_id) != asked:
                return "REQUEUED"
            own = outcome(self._paths[job_id].result_pickle) if job_id in self._paths else None
            return own or ("FAILED" if state == "ENDED" else state)
        return state


def outcome(result: Path) -> str | None:
    """Return COMPLETED or FAILED, the first word of a result; None without a result."""
    try:
        with result.open("rb") as file:
            word = next(arg for _, arg, _ in pickletools.genops(file) if isinstance(arg, str))
    except (FileNotFoundError, StopIteration, ValueError):
        return None
    return "COMPLETED" if word == "success" else "FAILED"


class PbsJob(core.Job[R]):
    """A job that keeps its id, files and result, whichever PBS job runs it."""

    _cancel_command = "qdel"
    watcher = PbsInfoWatcher()

    def cancel(self, check: bool = True) -> None:
        """Cancel the job, so that no other job continues it. Raises FailedJobError if PBS refuses, unless
        it has ended.
        """
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
