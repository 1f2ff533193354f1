"""A day with twenty experiments on a real Slurm, at the end of which the scheduler, the disk and the list agree."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.cli.main import main
from hpc_det.store.experiments import ExperimentStore
from tests.e2e.story import HERE
from tests.e2e.test_slurm import PROFILE, use
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.slurm

EXPERIMENTS = 20
AT_ONCE = 12
"""Number of jobs with two CPUs each that fit on the lab's three nodes of 8 CPUs."""
WAITS = """
import signal
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""
CONFIG = """
name: day
entrypoint: [python3, -m, hpc_det.launch.direct, waits.py, {evening}]
searcher: {{name: single, metric: loss}}
"""

HpcDet = Callable[..., str]


@pytest.fixture
def hpc_det(capfd: pytest.CaptureFixture[str]) -> HpcDet:
    """Return a function that runs a command in this process, checks that it succeeds, and returns its output."""

    def run(*arguments: object) -> str:
        umask = os.umask(0o022)
        code = main([str(argument) for argument in arguments])
        os.umask(umask)
        captured = capfd.readouterr()
        assert code == 0, captured.err
        return captured.out

    return run


class Day:
    """Twenty experiments, each of which waits for the file `evening`, on a lab that runs twelve at a time."""

    def __init__(self, lab: SlurmLab, hpc_det: HpcDet, root: Path) -> None:
        self.lab, self.hpc_det, self.root = lab, hpc_det, root
        self.evening = root / "evening"
        (code := root / "code").mkdir()
        (code / "waits.py").write_text(WAITS)
        (config := root / "day.yaml").write_text(CONFIG.format(evening=self.evening))
        for _ in range(EXPERIMENTS - 1):
            hpc_det("experiment", "create", config, code, "--cluster", "lab")
        hpc_det("experiment", "create", HERE / "story.yaml", HERE / "trial", "--cluster", "lab")

    def listed(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.hpc_det("experiment", "list", "--json"))
        return found

    def states(self) -> Counter[str]:
        return Counter(record["state"] for record in self.listed())

    def job(self, experiment: int) -> str:
        """Return the scheduler's ID of the newest job of an experiment."""
        described = json.loads(self.hpc_det("experiment", "describe", experiment, "--json"))
        return str(described["job_ids"][-1])

    def queued(self) -> list[str]:
        """Return the IDs of the pending jobs, in the order in which the scheduler would start them."""
        return self.lab.run("squeue", "--noheader", "--states=PENDING", "--sort=-p,i", "--format=%i").split()

    def running(self) -> set[str]:
        return set(self.lab.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").split())

    def until(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, DEADLINE_S, lambda: f"{self.states()}\n{self.lab.run('squeue')}")


def test_twenty_experiments_from_morning_to_evening(
    slurm_lab: SlurmLab, hpc_det: HpcDet, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(slurm_lab, monkeypatch, PROFILE.replace("cpus_per_slot: 1", "cpus_per_slot: 2"))
    root = Path(os.environ["HPC_DET_ROOT"])
    day = Day(slurm_lab, hpc_det, root)
    day.until(lambda: day.states() == {"RUNNING": AT_ONCE, "QUEUED": EXPERIMENTS - AT_ONCE})

    # the last of the pending jobs is moved ahead of all others
    urgent = day.job(EXPERIMENTS - 1)
    hpc_det("job", "update", urgent, "--ahead-of", day.queued()[0])
    assert day.queued()[0] == urgent
    rows = json.loads(hpc_det("job", "list", "--json", "--resource-pool", "low"))
    assert [row["id"] for row in rows][AT_ONCE] == urgent

    # two running jobs and a pending one are paused, and the urgent one starts
    hpc_det("experiment", "pause", "1-2,15")
    day.until(lambda: urgent in day.running())
    day.until(lambda: day.states()["PAUSED"] == 3)
    hpc_det("experiment", "activate", "1-2,15")
    day.until(lambda: day.states() == {"RUNNING": AT_ONCE, "QUEUED": EXPERIMENTS - AT_ONCE})

    hpc_det("experiment", "kill", "3")
    hpc_det("experiment", "set", "name", EXPERIMENTS, "the real one")
    hpc_det("experiment", "label", "add", f"4-{EXPERIMENTS}", "tuesday")
    day.evening.touch()
    hpc_det("experiment", "wait", f"1-2,4-{EXPERIMENTS}")

    hpc_det("experiment", "delete", "4,5", "--yes")
    hpc_det("experiment", "archive", "6-7")
    hpc_det("report", EXPERIMENTS, "-o", root / "report.html")

    day.until(lambda: slurm_lab.run("squeue", "--noheader", "--states=PENDING,RUNNING") == "")
    there = {experiment.id for experiment in ExperimentStore(root).all()}
    assert there == {*range(1, EXPERIMENTS + 1)} - {4, 5}
    listed = {record["id"]: record["state"] for record in day.listed()}
    assert listed.keys() == there - {6, 7}
    assert {number for number, state in listed.items() if state != "COMPLETED"} == {3}
    assert listed[3] == "CANCELED"
    assert day.listed()[-1]["name"] == "the real one"
    assert "the real one" in (root / "report.html").read_text()
