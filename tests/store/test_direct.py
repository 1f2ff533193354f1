from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.store.direct import is_past_the_cache, past_the_cache, write_at


@pytest.fixture
def file() -> Iterator[int]:
    """On a disk: a memory file system may know no O_DIRECT, and minds no part of a page."""
    with tempfile.TemporaryFile(dir="/var/tmp") as opened:
        past_the_cache(opened.fileno())
        yield opened.fileno()


def pages(content: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    return memoryview(memory)


def test_all_is_there_that_was_written_whole_pages_or_not(file: int) -> None:
    content = os.urandom(3 * mmap.PAGESIZE + 5)
    write_at(file, pages(content)[: 2 * mmap.PAGESIZE], 0)
    write_at(file, memoryview(content)[2 * mmap.PAGESIZE :], 2 * mmap.PAGESIZE)
    assert Path(f"/proc/self/fd/{file}").read_bytes() == content


def test_what_is_no_whole_page_is_written_through_the_cache(file: int) -> None:
    if not is_past_the_cache(file):
        pytest.skip("/var/tmp knows no O_DIRECT")
    write_at(file, memoryview(b"a few bytes"), 0)
    assert not is_past_the_cache(file)


def test_what_a_disk_refuses_otherwise_is_raised(file: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_at(10**6, pages(b"x" * mmap.PAGESIZE), 0)
