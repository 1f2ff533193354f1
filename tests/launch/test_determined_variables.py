from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import MANIFEST
from hpc_det.checkpoint.seals import CRC
from hpc_det.launch.determined_variables import determined_variables
from hpc_det.node.json_files import write_json
from hpc_det.store.attempt import Attempt
from tests.store.test_attempt import ATTEMPT

SPEC: dict[str, Any] = {
    "experiment_id": 12,
    "trial_id": 1,
    "trial_seed": 5,
    "hparams": {"lr": 0.1, "net": {"depth": 2}},
    "config": {"data": {"url": "here", "secrets": {"token": "canary"}}},
}


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Return the third attempt of a trial on the second of two nodes with four slots each."""
    attempt = replace(ATTEMPT, folder=str(tmp_path), number=3)
    write_json(attempt.trial.trial, SPEC)
    return attempt


def commit(attempt: Attempt, uuid: str, steps: int) -> None:
    folder = attempt.trial.checkpoints / uuid
    folder.mkdir(parents=True)
    manifest = CRC.sealed({"uuid": uuid, "steps_completed": steps, "time": steps, "files": {}})
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_new_trial_has_numbers_values_and_the_place_of_the_node(attempt: Attempt) -> None:
    found = determined_variables(attempt, "ib0")
    assert json.loads(found["DET_HPARAMS"]) == SPEC["hparams"]
    numbers = {name: found[f"DET_{name}"] for name in ("EXPERIMENT_ID", "TRIAL_ID", "TRIAL_RUN_ID", "TRIAL_SEED")}
    assert numbers == {"EXPERIMENT_ID": "12", "TRIAL_ID": "1", "TRIAL_RUN_ID": "3", "TRIAL_SEED": "5"}
    assert (found["DET_TASK_ID"], found["DET_ALLOCATION_ID"], found["DET_TASK_TYPE"]) == ("12.1", "12.1.3", "TRIAL")
    assert json.loads(found["DET_SLOT_IDS"]) == [0, 1, 2, 3]
    assert (found["DET_CHIEF_IP"], found["DET_INTER_NODE_NETWORK_INTERFACE"]) == (attempt.master_addr, "ib0")
    assert (found["DET_STEPS_COMPLETED"], "DET_LATEST_CHECKPOINT" in found) == ("0", False)


def test_a_trial_with_checkpoints_has_the_newest(attempt: Attempt) -> None:
    commit(attempt, "old", 10)
    commit(attempt, "new", 20)
    found = determined_variables(attempt, None)
    assert (found["DET_STEPS_COMPLETED"], found["DET_LATEST_CHECKPOINT"]) == ("20", "new")
    assert "DET_INTER_NODE_NETWORK_INTERFACE" not in found


def test_a_trial_that_starts_from_another_has_its_checkpoint_and_no_steps(attempt: Attempt) -> None:
    write_json(attempt.trial.trial, {**SPEC, "warm_start": "/runs/7/checkpoints/theirs"})
    found = determined_variables(attempt, None)
    assert (found["DET_STEPS_COMPLETED"], found["DET_LATEST_CHECKPOINT"]) == ("0", "theirs")


def test_secrets_are_masked(attempt: Attempt) -> None:
    found = determined_variables(attempt, None)
    assert "canary" not in str(found)
    assert json.loads(found["DET_EXPERIMENT_CONFIG"])["data"]["url"] == "here"


def test_a_value_too_long_for_the_environment_is_left_out_with_a_note(
    attempt: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(attempt.trial.trial, {**SPEC, "hparams": {"words": "x" * 200_000}})
    assert "DET_HPARAMS" not in determined_variables(attempt, None)
    assert "DET_HPARAMS" in capsys.readouterr().err


def test_there_are_none_without_a_trial(tmp_path: Path) -> None:
    assert determined_variables(replace(ATTEMPT, folder=str(tmp_path)), None) == {}
