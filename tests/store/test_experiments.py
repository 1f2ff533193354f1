from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.node import files
from hpc_det.store.experiments import ExperimentStore, configured_root, state_root
from tests.facts import refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    return root


def env(root: Path) -> dict[str, str]:
    return {"HPC_DET_ROOT": str(root)}


@pytest.mark.parametrize("mode", [0o700, 0o710, 0o750, 0o755])
def test_a_root_that_its_user_alone_can_write_is_taken(root: Path, mode: int) -> None:
    root.chmod(mode)
    assert state_root(env(root)) == root


def test_a_root_that_is_not_there_yet_is_taken(root: Path) -> None:
    assert state_root(env(root / "new")) == root / "new"


@pytest.mark.parametrize(("mode", "remedy"), [(0o777, "chmod go-w"), (0o702, "chmod go-w"), (0o1777, "set it")])
def test_a_root_that_others_can_write_is_refused_with_the_remedy(root: Path, mode: int, remedy: str) -> None:
    root.chmod(mode)
    with refused(UsageError, root, f"{mode:04o}", remedy):
        state_root(env(root))
    assert configured_root(env(root)).path == root


@pytest.mark.parametrize("alone", [True, False])
def test_a_group_that_is_the_users_alone_may_write(root: Path, alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    root.chmod(0o770)
    monkeypatch.setattr(files, "is_users_alone", lambda group: alone)
    if alone:
        assert state_root(env(root)) == root
        return
    with pytest.raises(UsageError):
        state_root(env(root))


def test_a_root_that_cannot_be_created_is_named_with_the_folder_that_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    root = tmp_path / "file" / "ada" / "hpc_det"
    with refused(UsageError, root, "HPC_DET_ROOT"):
        ExperimentStore(root).create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_root_of_another_user_is_refused(root: Path) -> None:
    os.chown(root, 1234, -1)
    with refused(UsageError, root, 1234):
        state_root(env(root))


def test_an_incomplete_experiment_is_not_named_as_the_newest(root: Path) -> None:
    (root / "experiments" / "77").mkdir(parents=True)
    with refused(UsageError, "experiment 77", "which has no experiment"):
        ExperimentStore(root).existing(77)
