"""A script with a Trainer as users start it: in a job, and under torchrun without a job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed
from hpc_det.node.json_files import read_json
from hpc_det.node.process import descendants
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.e2e.story import HERE, Story
from tests.processes import words
from tests.wait import DEADLINE_S, wait_for

TWO_SLOTS = "resources.slots_per_trial=2"
SCRIPT = "entrypoint=python3 -m hpc_det.launch.direct train.py"


@pytest.mark.long
def test_a_script_that_fails_is_named_with_its_error() -> None:
    story = Story.begin(SCRIPT, "hyperparameters.raise_at=3", "max_restarts=0")
    ended = story.wait(check=False)
    assert ended.returncode == 1
    assert "RuntimeError: the sky has fallen" in ended.stderr
    assert story.causes == ["failed"]


def torchrun(root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"]
    environment = {**os.environ, "HPC_DET_ROOT": str(root), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=HERE / "trial", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def the_run(root: Path) -> TrialFolder | None:
    return next((TrialFolder(path) for path in (root / "local").glob("*")), None)


def until_batch(root: Path, batch: int, process: subprocess.Popen[str]) -> None:
    """Wait until an endless script has reached this batch."""

    def is_there() -> bool:
        assert process.poll() is None
        folder = the_run(root)
        return folder is not None and any(record["steps"] >= batch for record in read_reports(folder.metrics))

    wait_for(is_there, DEADLINE_S)


def ranks(launcher: int) -> list[int]:
    """Return the PIDs that run `train.py`, among this process and its descendants."""
    return [pid for pid in (launcher, *descendants(launcher)) if "train.py" in words(pid, "cmdline")]


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.long)])
def test_under_torchrun_alone_a_signal_to_one_rank_makes_both_save_and_leave(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = torchrun(tmp_path)
    try:
        until_batch(tmp_path, 5, process)
        os.kill(max(ranks(process.pid)), number)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert output.count("left the block, in a group: False") == 2
    folder = the_run(tmp_path)
    assert folder is not None
    outcome = read_json(folder.outcome)
    assert outcome is not None
    assert outcome["kind"] == "stopped"
    assert committed(folder.checkpoints)[0].steps == outcome["steps"]
