"""The PBS on PATH behind the same object, for tests that make sense on any site."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.labs.pbs_lab import Done, Job, PbsLab

ASKED_FOR = os.environ.get("HPC_DET_REAL_PBS") == "1"
SLOWER_S = 300.0
"""Seconds to wait at least: a site has other jobs, and polls rarely."""


class RealPbs(PbsLab):
    """The PBS on PATH. Nodes cannot fail. Tests that only managers may run are skipped for others; for a manager, they
    change this site's preemption for a while, and take all of its nodes. Jobs are submitted from a folder in the home
    folder.
    """

    def __init__(self) -> None:
        self._preempt_order: str | None = None
        """The site's own value, once it was changed."""
        self._folder = Path(tempfile.mkdtemp(prefix="pbs-lab-", dir=Path.home()))
        self._submitted: list[str] = []

    @property
    def home(self) -> Path:
        """The folder from which jobs are submitted; they start in the home folder itself."""
        return self._folder

    @property
    def queue(self) -> str | None:
        """`low` if there is a `high` that preempts it, as on the stand-in; otherwise None, the site's default."""
        return None if self.ended("qstat", "-Q", "low", "high").returncode else "low"

    def ended(self, *command: str | Path, cwd: Path | None = None, manager: bool = False) -> Done:
        done = subprocess.run(
            command, cwd=cwd or self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if manager and "Unauthorized Request" in done.stderr:
            pytest.skip(f"needs a manager of this PBS: {command[0]}")
        if command[0] == "qsub" and not done.returncode:
            self._submitted.append(done.stdout.strip())
        return done

    def job(self, job_id: str) -> Job:
        answer: dict[str, Job] = json.loads(self.run("qstat", "-x", "-f", "-F", "json", job_id))["Jobs"]
        return answer[job_id]

    def wait_for(self, job_id: str, states: str | object, deadline_s: float = SLOWER_S) -> Job:
        return super().wait_for(job_id, str(states), max(deadline_s, SLOWER_S))

    def preempt(self, nodes: int = 3, seconds: float = 1) -> str:
        if self.queue is None:
            pytest.skip("needs queues low and high, of which the second preempts the first")
        where = ["-q", "high", "-l", f"select={nodes}:ncpus=1,place=scatter:excl"]
        return self.submit(*where, "-o", "/dev/null", "-e", "/dev/null", "--", "/bin/sleep", str(seconds))

    def set_preempt_order(self, letters: str) -> None:
        found = re.search(r"preempt_order = (.*)", self.run("qmgr", "-c", "list sched", manager=True))
        self._preempt_order = self._preempt_order or (found[1] if found else "SCR")
        super().set_preempt_order(letters)

    def set_kill_delay(self, queue: str, seconds: int | None) -> None:
        """Do nothing: a site's own delay is long enough."""

    def stop(self) -> list[str]:
        if self._preempt_order:
            super().set_preempt_order(f'"{self._preempt_order}"')
        if self._submitted:
            self.ended("qdel", *self._submitted)
        shutil.rmtree(self._folder)
        return []
