from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_det.checkpoint.committed import MANIFEST
from hpc_det.checkpoint.seals import CRC
from hpc_det.compat.cluster_info import ClusterInfo, TrialInfo
from hpc_det.node.json_files import write_json
from hpc_det.store.attempt import Attempt
from tests.compat.programs import printed
from tests.facts import refused
from tests.store.test_attempt import ATTEMPT

pytestmark = pytest.mark.integration

SHOW = "import determined as det; info = det.get_cluster_info(); print("


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Return the attempt on the second of two nodes with four slots each; it has no checkpoint yet."""
    attempt = replace(ATTEMPT, folder=str(tmp_path))
    spec = {"experiment_id": 12, "trial_id": 1, "trial_seed": 5, "hparams": {"lr": 0.1}}
    write_json(attempt.trial.trial, {**spec, "config": {"data": {"url": "here"}}})
    attempt.trial.checkpoints.mkdir()
    return attempt


@pytest.fixture
def inside(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that evaluates an expression of `info` in a process with the environment of the attempt."""
    for name, value in attempt.to_env().items():
        monkeypatch.setenv(name, value)
    return lambda expression: printed(f"{SHOW}{expression})")


def commit(attempt: Attempt, uuid: str, steps: int) -> None:
    (attempt.trial.checkpoints / uuid).mkdir()
    manifest = CRC.sealed({"uuid": uuid, "steps_completed": steps, "time": steps, "files": {}})
    (attempt.trial.checkpoints / uuid / MANIFEST).write_text(json.dumps(manifest))


def test_outside_of_an_experiment_there_is_no_cluster() -> None:
    assert printed(f"{SHOW}info)") == "None"


def test_inside_it_tells_the_trial_and_the_node(inside: Callable[[str], str]) -> None:
    assert inside("info.trial") == "TrialInfo(trial_id=1, experiment_id=12, trial_seed=5, hparams={'lr': 0.1})"
    told = "info.slot_ids, info.container_rank, info.user_data, info.task_type, info.latest_checkpoint"
    assert inside(told) == "[0, 1, 2, 3] 1 {'url': 'here'} TRIAL None"


def test_the_latest_checkpoint_is_the_newest_one(attempt: Attempt) -> None:
    commit(attempt, "old", 10)
    commit(attempt, "new", 20)
    assert ClusterInfo.of(attempt).latest_checkpoint == "new"


def test_the_answer_stays_the_same_while_a_process_runs(inside: Callable[[str], str]) -> None:
    assert inside("det.get_cluster_info() is info") == "True"


def test_what_has_no_true_value_here_is_named(attempt: Attempt) -> None:
    assert ClusterInfo.of(attempt).trial == TrialInfo(trial_id=1, experiment_id=12, trial_seed=5, hparams={"lr": 0.1})
    info = ClusterInfo.of(attempt)
    assert info.trial._config == {"data": {"url": "here"}}
    with refused(AttributeError, "TrialInfo._debug"):
        print(info.trial._debug)
    with refused(AttributeError, "ClusterInfo.master_url"):
        print(info.master_url)
