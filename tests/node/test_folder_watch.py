"""Writes that the kernel reports: of which files, and what happens if there are too many or none can be reported."""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.node.folder_watch import FolderWatch


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a", tmp_path / "b"]
    for folder in found:
        folder.mkdir()
    return found


@pytest.fixture
def watch(folders: list[Path]) -> Iterator[FolderWatch]:
    watch = FolderWatch(folders)
    yield watch
    watch.close()


def is_readable(watch: FolderWatch) -> bool:
    return bool(select.select([watch.fd], [], [], 0)[0])


def write(path: Path) -> Path:
    with path.open("a") as file:
        file.write("a line\n")
    return path


def test_written_files_of_all_folders_are_reported_once(watch: FolderWatch, folders: list[Path]) -> None:
    assert not is_readable(watch)
    files = {write(folder / name) for folder in folders for name in ("rank-0.log", "a name of 17 bytes")}
    assert is_readable(watch)
    assert watch.written() == files
    assert not is_readable(watch)
    assert watch.written() == set()


def test_files_that_are_only_created_or_read_are_not_reported(watch: FolderWatch, folders: list[Path]) -> None:
    (folders[0] / "empty").touch()
    (folders[0] / "empty").read_text()
    assert watch.written() == set()


def test_after_very_many_writes_any_file_may_have_been_written(watch: FolderWatch, folders: list[Path]) -> None:
    for _ in range(1500):
        for name in ("rank-0.log", "rank-1.log"):
            write(folders[0] / name)
    assert watch.written() is None
    assert watch.written() == set()
    assert {write(folders[1] / "rank-2.log")} == watch.written()


def test_after_an_overflow_of_the_kernels_queue_any_file_may_have_been_written(watch: FolderWatch) -> None:
    reader, writer = os.pipe()
    os.write(writer, struct.pack("iIII", -1, 0x4000, 0, 0))
    os.dup2(reader, watch.fd)
    os.close(reader)
    os.close(writer)
    assert watch.written() is None


def test_a_folder_that_does_not_exist_cannot_be_watched_and_leaves_no_open_file(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        FolderWatch([tmp_path, tmp_path / "missing"])
    assert len(os.listdir("/proc/self/fd")) == len(before)
