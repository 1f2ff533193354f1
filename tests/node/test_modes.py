from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_det.node.files import (
    is_shared,
    make_folders,
    make_private,
    open_log,
    share,
    share_alike,
    share_copy,
    take_umask_of,
    write_atomic,
    write_first,
)
from hpc_det.node.json_files import append_line, write_json
from hpc_det.store.shared_log import SharedLog

Write = Callable[[Path], object]
WRITES: list[Write] = [
    lambda path: write_atomic(path, "text"),
    lambda path: write_json(path, {}),
    lambda path: append_line(path, {}),
    lambda path: os.close(open_log(path)),
]


@pytest.fixture(autouse=True, params=[0, 0o077], ids=["no umask", "umask 077"])
def umask(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    share(folder, os.getegid())
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("write", WRITES)
def test_a_file_is_for_whom_its_folder_is(shared: Path, tmp_path: Path, write: Write) -> None:
    for folder, expected in ((shared, 0o640), (tmp_path, 0o600)):
        write(folder / "file")
        write(folder / "file")
        assert mode(folder / "file") == expected


def test_folders_hand_it_on(shared: Path, tmp_path: Path) -> None:
    make_folders(shared / "a" / "b")
    make_folders(tmp_path / "a" / "b")
    assert [mode(shared / "a"), mode(shared / "a/b")] == [0o2750, 0o2750]
    assert [mode(tmp_path / "a"), mode(tmp_path / "a/b")] == [0o700, 0o700]


def test_what_is_private_stays_so_in_a_shared_folder(shared: Path) -> None:
    write_json(shared / "secret.json", {}, private=True)
    write_first(shared / "key", b"secret")
    make_private(shared / "folder")
    assert [mode(shared / name) & 0o077 for name in ("secret.json", "key", "folder")] == [0, 0, 0]
    assert not is_shared(shared / "folder")
    write_json(shared / "folder" / "file", {})
    assert mode(shared / "folder" / "file") == 0o600


def test_a_folder_that_a_umask_has_left_open_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    write_json(tmp_path / "open" / "file", {})
    assert mode(tmp_path / "open" / "file") == 0o600


def test_a_copy_in_a_shared_folder_is_read_and_run_by_the_group_and_written_by_the_owner(shared: Path) -> None:
    for own, expected in ((0o600, 0o640), (0o777, 0o750), (0o444, 0o440)):
        (shared / "copy").touch()
        (shared / "copy").chmod(own)
        share_copy(shared / "copy")
        assert mode(shared / "copy") == expected
        (shared / "copy").unlink()


def test_a_copy_elsewhere_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "copy").touch()
    (tmp_path / "copy").chmod(0o755)
    share_copy(tmp_path / "copy")
    assert mode(tmp_path / "copy") == 0o755


def test_a_folder_elsewhere_is_shared_as_its_model_is(shared: Path, tmp_path: Path) -> None:
    for model, expected in ((shared, 0o2750), (tmp_path, 0o700)):
        make_private(tmp_path / "elsewhere" / model.name)
        share_alike(tmp_path / "elsewhere" / model.name, model)
        assert mode(tmp_path / "elsewhere" / model.name) == expected


def test_what_libraries_write_is_for_whom_the_folder_is(shared: Path, tmp_path: Path) -> None:
    before = os.umask(0o022)
    os.umask(before)
    take_umask_of(tmp_path)
    assert os.umask(before) == before
    take_umask_of(shared)
    (shared / "by a library").touch()
    (shared / "folder").mkdir()
    os.umask(before)
    assert (mode(shared / "by a library"), mode(shared / "folder")) == (0o640, 0o2750)


def test_entries_of_a_log_are_for_whom_its_folder_is(shared: Path) -> None:
    SharedLog(shared).append({"event": "x"})
    assert [mode(path) for path in shared.iterdir()] == [0o640]
