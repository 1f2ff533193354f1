"""The metadata of a checkpoint: what the trial has saved, and what users add."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import METADATA, Committed, checksum, committed, newest_good
from hpc_det.checkpoint.metadata import add_metadata, all_metadata, remove_metadata, saved_metadata
from hpc_det.checkpoint.staging import Staging
from hpc_det.errors import UsageError
from hpc_det.node.json_files import DamagedFile
from hpc_det.store.folders import TrialFolder
from tests.facts import refused


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    folder = TrialFolder(tmp_path / "experiments" / "1" / "trials" / "1")
    folder.checkpoints.mkdir(parents=True)
    return folder


def saved(trial: TrialFolder, text: str) -> Committed:
    """Commit a checkpoint at 40 batches with this metadata.json."""
    staging = Staging(trial.checkpoints, "1f0c")
    staging.partial.mkdir()
    file = staging.partial / METADATA
    file.write_text(text)
    return staging.commit(40, {METADATA: checksum(file)})


def test_added_keys_stand_beside_the_saved_ones_and_leave_the_checkpoint_whole(trial: TrialFolder) -> None:
    checkpoint = saved(trial, '{"framework": "torch-2.13", "steps_completed": 40}')
    add_metadata(trial, checkpoint, {"stage": "production"})
    assert all_metadata(trial, checkpoint) == {
        "framework": "torch-2.13",
        "steps_completed": 40,
        "stage": "production",
    }
    assert newest_good(trial.checkpoints) == (checkpoint, [])
    assert committed(trial.checkpoints) == [checkpoint]


@pytest.mark.parametrize("text", ["", "[1]", "null", '{"framework": '])
def test_a_damaged_metadata_file_leaves_the_number_of_batches(trial: TrialFolder, text: str) -> None:
    assert saved_metadata(saved(trial, text)) == {"steps_completed": 40}


def test_saved_keys_are_neither_replaced_nor_removed(trial: TrialFolder) -> None:
    checkpoint = saved(trial, '{"framework": "torch-2.13"}')
    with refused(UsageError, "1f0c", "framework"):
        add_metadata(trial, checkpoint, {"framework": "x"})
    with refused(UsageError, "1f0c", "framework"):
        remove_metadata(trial, checkpoint, ["framework"])


def test_a_key_that_is_no_text_is_refused(trial: TrialFolder) -> None:
    with refused(UsageError, "1f0c", 7):
        add_metadata(trial, saved(trial, "{}"), {7: "seven"})  # type: ignore[dict-item]


def test_a_damaged_file_of_added_keys_is_named(trial: TrialFolder) -> None:
    checkpoint = saved(trial, "{}")
    add_metadata(trial, checkpoint, {"stage": "production"})
    file = trial.checkpoint_metadata(checkpoint.uuid)
    file.write_text("{")
    with refused(DamagedFile, file):
        all_metadata(trial, checkpoint)
