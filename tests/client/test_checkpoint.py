"""A checkpoint from Python: files, metadata, copies and deletion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_det import client
from hpc_det.client import Checkpoint
from hpc_det.errors import HpcDetError, UsageError
from tests.cli.conftest import Command
from tests.cli.life import FakeScheduler, Life
from tests.facts import refused


def test_a_checkpoint_knows_its_place_and_files(searched: Life, top: Checkpoint) -> None:
    assert top.path == searched.folder.trial(2).checkpoints / top.uuid
    assert (top.experiment_id, top.trial_id, top.steps, top.state) == (1, 2, 400, "COMPLETED")
    assert top.files == {"state_dict.pth": 7}
    assert top.metrics["accuracy"] == 0.95


def test_it_is_found_by_the_start_of_its_uuid(top: Checkpoint) -> None:
    assert client.get_checkpoint(top.uuid[:8]) == top
    with refused(UsageError, "ffff"):
        client.get_checkpoint("ffff")


def test_metadata_are_added_replaced_and_removed(top: Checkpoint) -> None:
    assert top.metadata == {"steps_completed": 400}
    top.add_metadata({"stage": "candidate", "scores": {"f1": 0.5}})
    top.add_metadata({"stage": "production"})
    again = client.get_checkpoint(top.uuid)
    assert again.metadata == {"steps_completed": 400, "stage": "production", "scores": {"f1": 0.5}}
    again.remove_metadata(["scores", "missing"])
    again.remove_metadata("stage")
    assert top.metadata == {"steps_completed": 400}


def test_metadata_do_not_damage_the_checkpoint_and_describe_shows_them(hpc_det: Command, top: Checkpoint) -> None:
    top.add_metadata({"stage": "production"})
    record = json.loads(hpc_det("checkpoint", "describe", top.uuid, "--verify", "--json").out)
    assert (record["metadata"]["stage"], record["damage"], record["state"]) == ("production", [], "COMPLETED")
    assert "production" in hpc_det("checkpoint", "describe", top.uuid).out


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [({"steps_completed": 1}, "steps_completed"), ({"x": float("nan")}, "JSON"), ({"x": object()}, "JSON")],
)
def test_metadata_that_cannot_be_kept_are_refused(top: Checkpoint, wrong: dict[str, object], facts: str) -> None:
    with refused(UsageError, top.uuid, facts):
        top.add_metadata(wrong)
    assert top.metadata == {"steps_completed": 400}


def test_what_the_trial_saved_cannot_be_removed(top: Checkpoint) -> None:
    with refused(UsageError, top.uuid, "steps_completed"):
        top.remove_metadata(["steps_completed"])


def test_a_copy_is_verified_and_overwrites_nothing(top: Checkpoint, tmp_path: Path) -> None:
    assert (top.download(tmp_path / "new" / "best") / "state_dict.pth").read_bytes() == b"weights"
    with refused(UsageError, tmp_path / "new" / "best"):
        top.download(tmp_path / "new" / "best")


def test_a_checkpoint_of_no_trial_class_says_which_files_it_has(top: Checkpoint) -> None:
    with refused(UsageError, top.uuid, top.path, "state_dict.pth"):
        top.load()


def test_a_deleted_checkpoint_is_gone_with_its_metadata(searched: Life, top: Checkpoint) -> None:
    top.add_metadata({"stage": "production"})
    kept = searched.folder.trial(2).checkpoint_metadata(top.uuid)
    assert kept.exists()
    top.delete()
    assert not kept.exists()
    assert top not in client.get(1).checkpoints()
    with refused(HpcDetError, top.uuid):
        _ = top.path


def test_a_checkpoint_of_a_running_experiment_is_not_deleted(life: Life, scheduler: FakeScheduler) -> None:
    life.begins()
    life.saves(100)
    (checkpoint,) = client.get(1).checkpoints()
    with refused(UsageError, "experiment 1", "RUNNING"):
        checkpoint.delete()
    assert checkpoint.path.exists()
