"""The archive of the Python environment: when it is current, and what a failed writer leaves."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from hpc_det.node.environment_archive import NotStaged, files_of, read_archive
from hpc_det.submit.stage import archive_path, is_current, make_current, write_archive
from tests.small_environment import Environment
from tests.stub import Stub
from tests.stub import stub as stub

pytestmark = pytest.mark.integration


@pytest.fixture(name="environment")
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    return Environment.make(tmp_path / "venv", monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return archive_path(tmp_path / "root", "tar")


def test_only_its_owner_can_read_an_archive(environment: Environment, path: Path) -> None:
    write_archive(path)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)] == [0o600, 0o700]


def test_an_archive_is_current_until_a_file_changes(environment: Environment, path: Path) -> None:
    assert not is_current(path)
    written = write_archive(path)
    assert written.files == len(files_of(str(environment.prefix)))
    assert is_current(path)
    (environment.site / "staged_package.py").write_text("value = 'edited in place'\n")
    assert not is_current(path)
    write_archive(path)
    environment.install("later")
    assert not is_current(path)


def test_byte_code_that_python_has_written_does_not_count(environment: Environment, path: Path) -> None:
    write_archive(path)
    cache = environment.site / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "staged_package.cpython-311.pyc").write_bytes(b"")
    assert is_current(path)


def test_an_archive_that_others_may_write_or_that_was_cut_is_refused(environment: Environment, path: Path) -> None:
    write_archive(path)
    path.chmod(0o660)
    with pytest.raises(NotStaged, match="others may change"):
        read_archive(str(path))
    path.chmod(0o600)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(NotStaged, match="damaged"):
        read_archive(str(path))


@pytest.mark.parametrize(("tool", "kind"), [("tar", "tar"), ("mksquashfs", "image")])
def test_a_tool_that_fails_leaves_no_archive_and_no_other_file(
    environment: Environment, tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str], tool: str, kind: str
) -> None:
    path = archive_path(tmp_path / "root", kind)
    write_archive(path)
    environment.install("later")
    stub(tool, "echo 'no space' >&2; exit 1")
    make_current(path)
    assert os.listdir(path.parent) == []
    assert f"{tool} failed: no space" in capsys.readouterr().err


def test_an_image_is_a_tar_file_where_mksquashfs_is_missing(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "mksquashfs" else find(name))
    path = archive_path(tmp_path / "root", "image")
    make_current(path)
    assert not read_archive(str(path)).is_image
    assert "mksquashfs is not installed" in capsys.readouterr().err
    assert is_current(path)


def test_a_prefix_that_is_no_environment_is_not_archived(environment: Environment, path: Path) -> None:
    (environment.prefix / "pyvenv.cfg").unlink()
    with pytest.raises(NotStaged, match="neither a venv nor a conda environment"):
        write_archive(path)


def test_other_environments_and_the_cache_of_a_conda_installation_are_left_out(
    environment: Environment, path: Path
) -> None:
    before = write_archive(path).files
    for name in ("pkgs", "envs"):
        (environment.prefix / name).mkdir()
        (environment.prefix / name / "large").touch()
    assert is_current(path)
    assert write_archive(path).files == before
