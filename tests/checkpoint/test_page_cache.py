from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

from hpc_det.checkpoint.page_cache import is_in_memory

MIB = 1 << 20


def test_a_file_is_in_memory_when_all_of_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    with file.open("wb", buffering=0) as opened:
        opened.truncate(4 * MIB)  # a hole is in no memory, be it of a disk or of a memory file system
        assert not is_in_memory(file)
        opened.write(os.urandom(2 * MIB))
        assert not is_in_memory(file)
        opened.write(os.urandom(2 * MIB))
        assert is_in_memory(file)


def test_a_few_pages_may_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    with file.open("wb", buffering=0) as opened:
        opened.write(os.urandom(8 * MIB))
        opened.truncate(8 * MIB + 4096)
    assert is_in_memory(file)


def test_an_empty_file_is_not_worth_it(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert not is_in_memory(tmp_path / "empty")


def test_what_little_was_put_out_is_read_again(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as opened:  # on a disk, as no memory file system puts out
        opened.write(os.urandom(8 * MIB))
        opened.flush()
        os.fsync(opened.fileno())
        for megabyte in range(8):
            os.posix_fadvise(opened.fileno(), megabyte * MIB, 4 * mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
        assert is_in_memory(Path(opened.name))
