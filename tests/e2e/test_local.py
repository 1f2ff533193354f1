"""Whole lives of experiments on this machine: real ranks, real signals, real kills."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import committed, newest_steps
from tests.e2e.story import DIRECT, HERE, WAITS_AT, WARM, Story, hpc_det
from tests.facts import unnamed
from tests.wait import DEADLINE_S

pytestmark = pytest.mark.usefixtures("warm")

TWO_SLOTS = "resources.slots_per_trial=2"


def test_an_experiment_trains_to_its_end_and_leaves_what_it_promises(undisturbed: Story) -> None:
    assert undisturbed.causes == ["finished"]
    assert [steps for kind, steps, _ in undisturbed.series if kind == "training"] == list(range(1, 41))
    assert [steps for kind, steps, _ in undisturbed.series if kind == "validation"] == [10, 20, 30, 40]
    # save_trial_best and save_trial_latest are 1 each
    assert 1 <= len(committed(undisturbed.trial.checkpoints)) <= 2
    assert committed(undisturbed.trial.checkpoints)[0].steps == 40


BUILT_WITH_CUDA = """
import os
if "HPC_DET_SLOT_TYPE" in os.environ:
    import torch
    torch.backends.cuda.is_built = lambda: print("built with CUDA") or True
"""


def test_a_torch_that_is_built_with_cuda_trains_on_slots_that_are_cpus(
    undisturbed_alone: Story, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    shutil.copytree(HERE / "trial", code)
    (code / "sitecustomize.py").write_text(f"{BUILT_WITH_CUDA}    assert torch.backends.cuda.is_built()\n")
    story = Story.begin(DIRECT, context=code)
    story.wait()
    assert "built with CUDA" in story.trial.rank_log(1, 0).read_text() + story.logged
    assert story.causes == ["finished"]
    assert story.same_as(undisturbed_alone)


def test_a_killed_rank_restarts_the_gang_from_the_last_checkpoint_and_is_charged(undisturbed: Story) -> None:
    story = Story.begin(TWO_SLOTS, WARM, WAITS_AT.format(20), "max_restarts=1")
    story.until_batch(20)
    os.kill(story.rank_pid(0), signal.SIGKILL)
    story.wait()
    assert story.causes == ["failed", "finished"]
    assert story.describe()["attempts"][0]["batches"] == 16
    assert not unnamed(story.logged, "killed", "crashed")
    assert story.same_as(undisturbed)


@pytest.mark.long
def test_a_killed_launcher_takes_its_ranks_along_and_is_named() -> None:
    story = Story.begin(TWO_SLOTS, WAITS_AT.format(5), "max_restarts=0")
    story.until_batch(2)
    (launcher,) = story.pids("torch.distributed.run")
    os.kill(launcher, signal.SIGKILL)
    ended = story.wait(check=False)
    assert story.causes == ["failed"]
    assert not unnamed(ended.stderr, "entrypoint", os.uname().nodename)


@pytest.mark.long
def test_a_crash_of_a_rank_is_named_and_counted_until_max_restarts_is_spent() -> None:
    story = Story.begin("max_restarts=1", "hyperparameters.die_at=3")
    ended = story.wait(check=False)
    assert ended.returncode == 1
    assert story.causes == ["failed", "failed"]
    assert "rank 0" in ended.stderr
    assert not unnamed(ended.stderr, "failure 2", "max_restarts is 1")


def test_the_failed_ranks_traceback_comes_first_in_the_log() -> None:
    story = Story.begin(TWO_SLOTS, WARM, "max_restarts=0", "hyperparameters.raise_at=3")
    ended = story.wait(check=False)
    assert ended.returncode == 1
    assert "RuntimeError: the sky has fallen" in ended.stderr
    assert "Traceback" not in ended.stderr
    first = story.logged.partition("first failure: ")[2]
    assert first.startswith("rank 1 on ")
    assert 'raise RuntimeError("the sky has fallen")' in first


def test_kill_ends_an_experiment_at_once() -> None:
    story = Story.begin(DIRECT, WAITS_AT.format(1))
    story.until_batch(1)
    hpc_det("experiment", "kill", story.number)
    assert story.describe()["state"] == "CANCELED"
    assert story.wait(check=False).returncode == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(undisturbed_alone: Story) -> None:
    story = Story.begin(WARM, WAITS_AT.format(26))
    story.until_batch(26)
    story.until(lambda: newest_steps(story.trial.checkpoints) == 24)
    newest = committed(story.trial.checkpoints)[0]
    weights = newest.path / "state_dict.pth"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    os.kill(story.rank_pid(0), signal.SIGKILL)
    story.wait()
    log = story.trial.rank_log(2, 0).read_text()
    facts = [f"checkpoint {newest.uuid}", f"{newest.steps} batches", "state_dict.pth: crc32"]
    assert [line for line in log.splitlines() if not unnamed(line, *facts)]
    assert story.same_as(undisturbed_alone)


def test_the_script_by_hand_does_the_same_job_and_once_done_ends_at_once(undisturbed_alone: Story) -> None:
    story = Story.begin(WARM, "hyperparameters.batch_s=5")
    story.until(story.trial.journal.exists)
    hpc_det("experiment", "kill", story.number)
    experiment = story.trial.experiment()
    for leftover in (story.trial.stop, story.trial.journal, *experiment.search.iterdir()):
        leftover.unlink()
    spec = story.trial.trial.read_text()
    story.trial.trial.write_text(spec.replace('"batch_s": 5', '"batch_s": 0'))
    for _ in range(2):
        subprocess.run(["bash", experiment.script()], check=True, timeout=DEADLINE_S)
    assert story.causes == ["finished"]
    assert story.same_as(undisturbed_alone)


def test_a_trial_that_cannot_be_imported_is_one_clear_sentence_and_no_restart(tmp_path: Path) -> None:
    working = (HERE / "trial" / "model_def.py").read_text()
    (tmp_path / "model_def.py").write_text(
        working.replace("import numpy as np", "import numpy as np\nimport no_such_package")
    )
    story = Story.begin(TWO_SLOTS, WARM, context=tmp_path)
    ended = story.wait(check=False)
    assert ended.returncode == 1
    facts = ["model_def", "ModuleNotFoundError: No module named 'no_such_package'", "model_def.py, line 8"]
    assert not unnamed(ended.stderr, *facts)
    assert "Traceback" not in story.logged
    assert story.causes == ["failed"]


def test_a_rank_that_hangs_is_named_with_its_stack_and_the_gang_goes_on_uncharged(undisturbed: Story) -> None:
    story = Story.begin(TWO_SLOTS, WARM, "max_restarts=0", "hang_timeout_s=5", WAITS_AT.format(20))
    story.wait()
    assert story.causes == ["hung", "finished"]
    assert "first failure: rank 1 on " in story.logged
    assert "; rank 1: training, batch 20, _wait (model_def.py:" in story.logged
    stacks = [story.trial.rank_log(1, rank).read_text() for rank in (0, 1)]
    assert ["in _wait\n" in stack for stack in stacks] == [False, True]
    assert all("in _train_to_boundary\n" in stack for stack in stacks)
    assert story.same_as(undisturbed)
