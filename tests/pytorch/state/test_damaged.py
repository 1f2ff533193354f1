"""A trial whose checkpoints are damaged between its attempts loses no training that an intact checkpoint contains."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import Committed, committed, newest_good, newest_steps
from hpc_det.checkpoint.damaged import damaged_ones
from hpc_det.errors import HpcDetError
from hpc_det.pytorch.state.load import load_trial_from_checkpoint_path
from hpc_det.requeue import Action, AttemptEnd, Cause, decide
from tests.facts import refused, unnamed
from tests.pytorch.trials import Life, StopAt, assert_same

QUIET: dict[str, Any] = {
    "checkpoint_policy": "none",
    "min_validation_period": {"batches": 100},
    "min_checkpoint_period": {"batches": 100},
}
"""Only a stop and the end of the training save a checkpoint."""


def stop_at(life: Life, batches: int) -> None:
    """Run the next attempt, which stops after this batch."""
    life.attempt(StopAt(batches - newest_whole(life) + 1))


def newest_whole(life: Life) -> int:
    found, _ = newest_good(life.folder.checkpoints)
    return found.steps if found else 0


@pytest.fixture
def life(tmp_path: Path) -> Life:
    """Return a trial that was stopped twice: checkpoints at 5 and 10 of 18 batches."""
    life = Life.begin(tmp_path / "trial", **QUIET)
    life.code = tmp_path / "code"
    (life.code / "models").mkdir(parents=True)
    (life.code / "model_def.py").write_text("class Trial: ...")
    (life.code / "models" / "net.py").write_text("layers = 3")
    for batches in (5, 10):
        stop_at(life, batches)
    assert life.checkpoints == [5, 10]
    return life


def newest(life: Life) -> Committed:
    return committed(life.folder.checkpoints)[0]


def flip_a_bit(path: Path) -> None:
    """Flip a bit of the file in place, so that other links to the file are damaged too."""
    mode = path.stat().st_mode
    path.chmod(0o600)
    with path.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))
    path.chmod(mode)


def test_a_flipped_bit_in_the_code_costs_no_batch_and_no_checkpoint(
    life: Life, capfd: pytest.CaptureFixture[str]
) -> None:
    flip_a_bit(newest(life).path / "code" / "model_def.py")
    assert [len(found.code_damage()) for found in committed(life.folder.checkpoints)] == [1, 1], "they share the file"
    stop_at(life, 12)
    assert life.checkpoints == [10, 12]
    assert damaged_ones(life.folder.checkpoints) == []
    assert [found.code_damage() for found in committed(life.folder.checkpoints)] == [[], []], "restored from code/"
    assert str(newest(life).path.parent) in capfd.readouterr().out
    assert life.steps("training")[-1] == 12


def test_code_of_which_no_good_copy_is_left_is_named_and_stays_damaged(
    life: Life, capfd: pytest.CaptureFixture[str]
) -> None:
    assert life.code
    flip_a_bit(newest(life).path / "code" / "models" / "net.py")
    (life.code / "models" / "net.py").write_text("layers = 4")  # as if the trial had changed it
    stop_at(life, 12)
    assert life.checkpoints == [10, 12]
    assert unnamed(capfd.readouterr().out, "models/net.py", "damaged") == []
    assert [len(found.code_damage()) for found in committed(life.folder.checkpoints)] == [1, 1], "it passes for none"


def test_what_was_planted_beside_the_code_is_named_and_never_imported(
    life: Life, capfd: pytest.CaptureFixture[str]
) -> None:
    (newest(life).path / "code" / "torch.py").write_text("raise SystemExit")
    planted = newest(life)
    stop_at(life, 12)
    assert unnamed(capfd.readouterr().out, "code/torch.py", "manifest") == []
    with refused(HpcDetError, "code/torch.py"):
        load_trial_from_checkpoint_path(planted.path)


def test_a_damaged_state_is_set_aside_and_new_checkpoints_stay(life: Life, tmp_path: Path) -> None:
    damaged = newest(life)
    flip_a_bit(damaged.path / "state_dict.pth")
    stop_at(life, 7)
    assert life.checkpoints == [5, 7], "the damaged one at 10 counts no more"
    assert newest_steps(life.folder.checkpoints) == 7
    (aside,) = damaged_ones(life.folder.checkpoints)
    assert (aside.uuid, aside.steps, Path(aside.place).is_dir()) == (damaged.uuid, 10, True)
    assert sorted(os.listdir(aside.place)) == sorted(
        {Path(name).parts[0] for name in damaged.files} | {"manifest.json"}
    )
    life.attempt()
    undisturbed = Life.begin(tmp_path / "undisturbed", **QUIET)
    undisturbed.code = life.code
    undisturbed.attempt()
    assert_same(life, undisturbed)


def test_a_trial_with_a_damaged_checkpoint_outlives_five_preemptions(life: Life) -> None:
    flip_a_bit(newest(life).path / "state_dict.pth")
    history = [AttemptEnd(cause=Cause.PREEMPTED, steps=steps) for steps in (5, 10)]
    for batches in (6, 7, 8, 9, 11, 18):
        stop_at(life, batches)
        history.append(AttemptEnd(cause=Cause.PREEMPTED, steps=newest_steps(life.folder.checkpoints)))
        assert decide(history, 0).action is Action.REQUEUE
    assert life.checkpoints[-1] == 18


def test_without_any_whole_checkpoint_the_trial_begins_anew_and_keeps_what_it_makes(life: Life) -> None:
    for checkpoint in committed(life.folder.checkpoints):
        flip_a_bit(checkpoint.path / "state_dict.pth")
    stop_at(life, 3)
    assert life.checkpoints == [3]
    assert [found.steps for found in damaged_ones(life.folder.checkpoints)] == [10, 5]
