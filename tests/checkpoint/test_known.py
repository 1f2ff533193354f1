from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_det.checkpoint import checkpoints as module
from hpc_det.checkpoint.checkpoints import KnownCheckpoints
from hpc_det.checkpoint.committed import Committed, committed_at
from tests.checkpoint.saved import saved


def test_each_manifest_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def noted(folder: Path) -> Committed | None:
        read.append(folder.name)
        return committed_at(folder)

    monkeypatch.setattr(module, "committed_at", noted)
    earlier, checkpoints = saved(tmp_path, 3), KnownCheckpoints(tmp_path)
    (tmp_path / "no checkpoint").mkdir()
    assert [each.steps for each in checkpoints.all()] == [3]
    own = saved(tmp_path, 5)
    checkpoints.add(own)
    others = saved(tmp_path, 4)
    assert [each.steps for each in checkpoints.all()] == [5, 4, 3]
    shutil.rmtree(others.path)
    assert [each.steps for each in checkpoints.all()] == [5, 3]
    assert sorted(read) == sorted([earlier.uuid, "no checkpoint", others.uuid])


def test_there_may_be_no_folder(tmp_path: Path) -> None:
    assert KnownCheckpoints(tmp_path / "missing").all() == []
