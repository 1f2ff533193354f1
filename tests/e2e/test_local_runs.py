"""A script that a user starts without a job: listed, killed, started again, stopped by commands, under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.node.process import kill_tree
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.e2e.story import HERE, Story, hpc_det
from tests.wait import DEADLINE_S, wait_for

SCRIPT = HERE / "core" / "local.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Terminal:
    """Starts the script, and ends what is left after the test."""

    def __init__(self, folder: Path) -> None:
        self._enough = folder / "enough"
        self._environment = {**os.environ, "ENOUGH": str(self._enough), "OMP_NUM_THREADS": "1"}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *launcher: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, *launcher, str(SCRIPT)]
        self._started.append(subprocess.Popen(command, env=self._environment, start_new_session=True))
        return self._started[-1]

    def start_to_the_end(self, *launcher: str) -> None:
        self._enough.touch()
        assert self.start(*launcher).wait(DEADLINE_S) == 0

    def close(self) -> None:
        for process in self._started:
            kill_tree(process)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def listed() -> dict[int, str]:
    """Return the state of each experiment by its number."""
    return {each["id"]: each["state"] for each in json.loads(hpc_det("experiment", "list", "--json").stdout)}


def trial(number: int) -> TrialFolder:
    return Story.of(number).trial


def until_saved(number: int, saves: int = 2) -> None:
    """Wait until the run has so many checkpoints, of which it keeps the newest."""
    folder = trial(number)
    wait_for(
        lambda: (
            folder.saves.exists()
            and len(folder.saves.read_text().splitlines()) >= saves
            and any(found.steps for found in committed(folder.checkpoints))
        ),
        DEADLINE_S,
        every_s=0.05,
    )


@pytest.mark.integration
def test_a_killed_run_is_listed_as_failed_and_resumes_when_it_is_started_again(terminal: Terminal) -> None:
    process = terminal.start()
    until_saved(1)
    assert listed() == {1: "RUNNING"}
    process.kill()
    process.wait()
    assert listed() == {1: "ERROR"}
    terminal.start_to_the_end()
    assert listed() == {1: "COMPLETED"}
    described: dict[str, Any] = Story.of(1).describe()
    assert [attempt["cause"] for attempt in described["attempts"]] == ["failed", "finished"]
    assert (described["name"], described["trials"][0]["hyperparameters"]) == ("local", {"lr": 0.1})
    assert described["validation"] == {"validation_loss": 0}  # no batch was lost or trained twice
    assert hpc_det("experiment", "logs", 1).stdout == ""
    assert hpc_det("experiment", "fork", 1, check=False).returncode != 0
    hpc_det("report", 1, "--output", trial(1).path / "report.html")
    hpc_det("experiment", "delete", 1, "--yes")
    assert listed() == {}


@pytest.mark.long
@pytest.mark.integration
def test_two_runs_at_the_same_time_are_stopped_by_commands(terminal: Terminal) -> None:
    paused = terminal.start()
    until_saved(1)
    killed = terminal.start()
    until_saved(2)
    assert listed() == {1: "RUNNING", 2: "RUNNING"}
    hpc_det("experiment", "pause", 1)
    hpc_det("experiment", "kill", 2)
    assert (paused.wait(DEADLINE_S), killed.wait(DEADLINE_S)) == (0, -signal.SIGKILL)
    assert listed() == {1: "PAUSED", 2: "CANCELED"}
    assert committed(trial(1).checkpoints)[0].steps == read_reports(trial(1).metrics)[-1]["steps"]
    terminal.start_to_the_end()  # the newest run of the script
    assert listed() == {1: "PAUSED", 2: "COMPLETED"}


@pytest.mark.long
def test_of_two_processes_that_start_again_at_once_only_one_resumes(terminal: Terminal) -> None:
    process = terminal.start()
    until_saved(1)
    process.kill()
    process.wait()
    both = [terminal.start(), terminal.start()]
    wait_for(lambda: listed() == {1: "RUNNING", 2: "RUNNING"}, DEADLINE_S, every_s=0.5)
    for each in both:
        each.terminate()
    assert [each.wait(DEADLINE_S) for each in both] == [0, 0]
    assert listed() == {1: "PAUSED", 2: "PAUSED"}


@pytest.mark.long
@pytest.mark.integration
def test_ranks_under_torchrun_are_one_run(terminal: Terminal) -> None:
    process = terminal.start(*TORCHRUN)
    until_saved(1)
    assert listed() == {1: "RUNNING"}
    process.terminate()
    process.wait(DEADLINE_S)
    assert listed() == {1: "PAUSED"}
    terminal.start_to_the_end(*TORCHRUN)
    assert listed() == {1: "COMPLETED"}
    described = Story.of(1).describe()
    assert (described["slots"], len(described["attempts"])) == (2, 2)
    assert described["validation"] == {"validation_loss": 0}
