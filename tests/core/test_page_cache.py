from __future__ import annotations

import os
from pathlib import Path

from hpc_det.core.page_cache import is_in_memory

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
