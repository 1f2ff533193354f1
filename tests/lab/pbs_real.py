"""The PBS on PATH behind the same object, for those contract tests that make sense on a site of somebody else's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.lab.pbs_lab import Done, Job, PbsLab

ASKED_FOR = os.environ.get("HPC_DET_REAL_PBS") == "1"


class RealPbs(PbsLab):
    """No manager, no failing nodes: only what any user may ask. Its tests submit from a folder in the home folder."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="pbs-lab-", dir=Path.home()))
        self._submitted: list[str] = []

    @property
    def home(self) -> Path:
        """Where jobs are submitted; they start in the home folder itself."""
        return self._folder

    def ended(self, *command: str | Path, cwd: Path | None = None, manager: bool = False) -> Done:
        assert not manager
        done = subprocess.run(
            command, cwd=cwd or self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if command[0] == "qsub" and not done.returncode:
            self._submitted.append(done.stdout.strip())
        return done

    def job(self, job_id: str) -> Job:
        answer: dict[str, Job] = json.loads(self.run("qstat", "-x", "-f", "-F", "json", job_id))["Jobs"]
        return answer[job_id]

    def wait_for(self, job_id: str, states: str | object, deadline_s: float = 300) -> Job:
        return super().wait_for(job_id, str(states), max(deadline_s, 300))

    def stop(self) -> list[str]:
        if self._submitted:
            self.ended("qdel", *self._submitted)
        shutil.rmtree(self._folder)
        return []
