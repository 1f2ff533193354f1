from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.store.run_folder import RunFolder, run_of
from tests.facts import refused


def modes(path: Path) -> dict[str, int]:
    return {str(found.relative_to(path)): found.stat().st_mode & 0o777 for found in (path, *path.rglob("*"))}


def test_a_run_is_its_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = RunFolder(tmp_path / "new" / "run")
        run.make()
        run.key()
    finally:
        os.umask(before)
    assert modes(tmp_path / "new") == {
        ".": 0o700,
        "run": 0o700,
        "run/drivers": 0o700,
        "run/nodes": 0o700,
        "run/snapshots": 0o700,
        "run/logs": 0o700,
        "run/key": 0o600,
    }


def test_a_run_that_goes_on_keeps_its_key(tmp_path: Path) -> None:
    first, again = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    first.make()
    key = first.key()
    again.make()
    assert again.key() == key


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_see_is_no_run_folder(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with refused(UsageError, f"{tmp_path}: ", f"{mode:04o}", "0700", f"`chmod 700 {tmp_path}`"):
        RunFolder(tmp_path).make()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_else_is_no_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with refused(UsageError, f"{tmp_path}: ", f"user {me}", f"user {me + 1}"):
        RunFolder(tmp_path).make()


def test_where_no_folder_can_be_made_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refused(UsageError, tmp_path / "file", os.strerror(errno.ENOTDIR), "nodes"):
        RunFolder(tmp_path / "file" / "run").make()
    with refused(UsageError, tmp_path / "file", os.strerror(errno.ENOTDIR), "nodes"):
        run_of(None, {"HPC_DET_ROOT": str(tmp_path / "file")})


def test_the_names_of_its_folders_are_on_disk_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr("hpc_det.node.disk.flush_folder", flushed.append)
    RunFolder(tmp_path / "new" / "run").make()
    assert {tmp_path, tmp_path / "new", tmp_path / "new" / "run"} <= {*flushed}
