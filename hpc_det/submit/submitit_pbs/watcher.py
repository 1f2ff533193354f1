"""The state of all jobs that a program holds, asked at once."""

from __future__ import annotations

import pickletools
import time
from pathlib import Path

from submitit.core import core

from hpc_det.submit.submitit_pbs.paths import PbsJobPaths
from hpc_det.submit.submitit_pbs.qstat import ask, state_in


class PbsInfoWatcher(core.InfoWatcher):
    """One for all jobs of a program. submitit's base class says when to ask: after 2 s, and ever less often."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._paths: dict[str, PbsJobPaths] = {}

    def watch(self, paths: PbsJobPaths) -> None:
        self._paths[str(paths.job_id)] = paths
        self.register_job(str(paths.job_id))

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return str(self.get_info(job_id, mode).get("State", "UNKNOWN"))

    def update(self) -> None:
        """The job that went on for another is asked about in its place."""
        if not (waiting := self._registered - self._finished):
            return
        self._num_calls += 1
        latest = {job_id: self._latest(job_id) for job_id in waiting}
        answer = ask(latest.values())
        for job_id, asked in latest.items():
            if state := state_in(answer, asked):
                self._info_dict[job_id] = {"JobID": asked, "State": self._state(job_id, asked, state)}
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in waiting if self.is_done(job_id, mode="cache")}

    def _latest(self, job_id: str) -> str:
        return self._paths[job_id].chain()[-1] if job_id in self._paths else job_id

    def _state(self, job_id: str, asked: str, state: str) -> str:
        """A job that ended is followed by the next, which was written down before: so it is looked up after."""
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "ENDED"):
            if self._latest(job_id) != asked:
                return "REQUEUED"
            own = outcome(self._paths[job_id].result_pickle) if job_id in self._paths else None
            return own or ("FAILED" if state == "ENDED" else state)
        return state


def outcome(result: Path) -> str | None:
    """COMPLETED or FAILED: a result is a pair, whose first word stands at its beginning. None: there is no result."""
    try:
        with result.open("rb") as file:
            word = next(arg for _, arg, _ in pickletools.genops(file) if isinstance(arg, str))
    except (FileNotFoundError, StopIteration, ValueError):
        return None
    return "COMPLETED" if word == "success" else "FAILED"
