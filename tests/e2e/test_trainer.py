"""The Trainer form as users start it: in a job, and under torchrun without one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_det.process import descendants
from hpc_det.store.files import read_json
from hpc_det.store.folders import TrialFolder
from hpc_det.store.metrics import read_reports
from tests.e2e.story import HERE, Story

TWO_SLOTS = "resources.slots_per_trial=2"
SCRIPT = "entrypoint=python3 -m hpc_det.launch.direct train.py"


def test_a_script_in_a_job_is_preempted_and_ends_with_the_bits_of_the_trial_itself(undisturbed: Story) -> None:
    script = Story.begin(TWO_SLOTS, SCRIPT, "hyperparameters.batch_s=0.03")
    script.until_batch(13)
    (agent,) = script.pids("hpc_det.launch.agent")
    os.kill(agent, signal.SIGTERM)
    script.wait()
    assert script.causes == ["preempted", "finished"]
    assert script.same_as(undisturbed)
    assert script.trial.rank_log(2, 0).read_text().splitlines()[-1] == "left the block, in a group: False"


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
    end = time.monotonic() + 90
    while not any(
        record["steps"] >= batch for folder in [the_run(root)] if folder for record in read_reports(folder.metrics)
    ):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR2, marks=pytest.mark.long)])
def test_under_torchrun_alone_a_signal_to_one_rank_makes_both_save_and_leave(
    tmp_path: Path, number: signal.Signals
) -> None:
    process = torchrun(tmp_path)
    try:
        until_batch(tmp_path, 5, process)
        ranks = [pid for pid in descendants(process.pid) if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(max(ranks), number)
        output, _ = process.communicate(timeout=90)
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
    (checkpoint,) = folder.checkpoints.glob("*/manifest.json")
    assert read_json(checkpoint)["steps_completed"] == outcome["steps"]  # type: ignore[index]
