"""Errors that may pass while a checkpoint is read: no checkpoint is set aside for one that does not come again."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint import passing_errors
from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import committed
from hpc_det.checkpoint.damaged import damaged_ones
from hpc_det.distributed.collectives import Distributed
from hpc_det.node import disk
from tests.checkpoint.saved import saved


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


def fail(monkeypatch: pytest.MonkeyPatch, call: str, code: int, times: int, about: str) -> None:
    """`os.CALL` raises so many times, where its first argument is a descriptor or names `about`."""
    former: Callable[..., Any] = getattr(os, call)
    left = [times]

    def failing(first: Any, *arguments: Any, **options: Any) -> Any:
        if left[0] and (call == "preadv" or about in str(first)):
            left[0] -= 1
            raise OSError(code, os.strerror(code), first)
        return former(first, *arguments, **options)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["preadv", "open", "scandir", "lstat"])
def test_the_newest_one_is_taken_when_an_error_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], call: str, code: int
) -> None:
    saved(tmp_path, 10)
    newest = saved(tmp_path, 20)
    about = f"{newest.uuid}/manifest.json" if call == "open" else newest.uuid
    fail(monkeypatch, call, code, 1, about)
    assert CheckpointContext(tmp_path, Distributed()).newest() == (newest.path, 20)
    assert damaged_ones(tmp_path) == []
    assert pauses == [passing_errors.PAUSE_S]


def test_one_that_comes_again_sets_it_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    fail(monkeypatch, "scandir", errno.EIO, 2, newest.uuid)
    assert CheckpointContext(tmp_path, Distributed()).newest() == (earlier.path, 10)
    assert [found.uuid for found in damaged_ones(tmp_path)] == [newest.uuid]


def test_wrong_content_is_not_read_again(tmp_path: Path, pauses: list[float]) -> None:
    saved(tmp_path, 10)
    (saved(tmp_path, 20).path / "state.pt").unlink()
    (saved(tmp_path, 30).path / "state.pt").write_bytes(b"weights" * 29 + b"Weights")
    (saved(tmp_path, 40).path / "manifest.json").write_text("{}")
    found = CheckpointContext(tmp_path, Distributed()).newest()
    assert found
    assert found[1] == 10
    assert pauses == []


def full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_keep_a_damaged_one_from_being_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    (newest.path / "state.pt").write_bytes(b"")
    monkeypatch.setattr(disk, "write", full)
    assert CheckpointContext(tmp_path, Distributed()).newest() == (earlier.path, 10)
    assert [found.steps for found in committed(tmp_path)] == [10]
    assert [found.uuid for found in damaged_ones(tmp_path)] == [newest.uuid]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_one_that_cannot_be_renamed_now_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Which would end the trial."""

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    (saved(tmp_path, 20).path / "state.pt").write_bytes(b"")
    monkeypatch.setattr(disk, "rename", fails)
    with pytest.raises(OSError, match=os.strerror(code)) as raised:
        CheckpointContext(tmp_path, Distributed()).newest()
    assert raised.value.errno == code
