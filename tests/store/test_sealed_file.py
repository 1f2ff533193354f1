from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_det.store.sealed_file import Superseded, seal, seal_of, write_sealed

KEY = bytes(range(32))
LONG = os.urandom(2**22 * 3 + 4321)


@pytest.fixture
def memory() -> Iterator[memoryview]:
    """It begins with a page, as O_DIRECT wants it."""
    mapped = mmap.mmap(-1, len(LONG))
    mapped.write(LONG)
    with memoryview(mapped) as content:
        yield content


@pytest.mark.parametrize("size", [1, 4096, 2**22, 2**22 + 1, len(LONG)])
def test_memory_is_written_with_its_seal(memory: memoryview, tmp_path: Path, size: int) -> None:
    sealed = write_sealed(memory[:size], tmp_path / "file", KEY)
    assert (tmp_path / "file").read_bytes() == LONG[:size]
    assert sealed == seal_of(tmp_path / "file", KEY) == seal(LONG[:size], KEY)
    assert sealed.size == size
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_it_may_begin_anywhere(memory: memoryview, tmp_path: Path) -> None:
    sealed = write_sealed(memory[77:], tmp_path / "file", KEY)
    assert (tmp_path / "file").read_bytes() == LONG[77:]
    assert sealed == seal(LONG[77:], KEY)


def test_a_file_system_that_has_a_page_cache_only_is_no_obstacle(
    memory: memoryview, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refused)
    assert write_sealed(memory, tmp_path / "file", KEY) == seal_of(tmp_path / "file", KEY)
    assert (tmp_path / "file").read_bytes() == LONG


def test_what_the_disk_refuses_is_raised(memory: memoryview, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write_sealed(memory, tmp_path / "file", KEY)


def test_what_nobody_wants_any_more_is_given_up(memory: memoryview, tmp_path: Path) -> None:
    asked = []

    def is_superseded() -> bool:
        asked.append(True)
        return len(asked) > 2

    with pytest.raises(Superseded):
        write_sealed(memory, tmp_path / "file", KEY, is_superseded)
    assert (tmp_path / "file").stat().st_size < len(LONG)


def test_no_file_takes_the_place_of_another(tmp_path: Path) -> None:
    write_sealed(memoryview(b"state"), tmp_path / "file", KEY)
    with pytest.raises(FileExistsError):
        write_sealed(memoryview(b"state"), tmp_path / "file", KEY)


def test_an_empty_file_has_a_seal_too(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert seal_of(tmp_path / "empty", KEY) == seal(b"", KEY)


@pytest.mark.parametrize("place", [0, 2**22, len(LONG) - 1])
def test_a_seal_shows_one_changed_bit_and_another_key(tmp_path: Path, place: int) -> None:
    (tmp_path / "file").write_bytes(LONG)
    before = seal_of(tmp_path / "file", KEY)
    assert seal_of(tmp_path / "file", KEY[::-1]).mac != before.mac
    changed = bytearray(LONG)
    changed[place] ^= 1
    (tmp_path / "file").write_bytes(changed)
    assert seal_of(tmp_path / "file", KEY).mac != before.mac


def test_a_seal_shows_blocks_that_have_changed_places() -> None:
    first, second = LONG[: 2**22], LONG[2**22 : 2**23]
    assert seal(first + second, KEY).mac != seal(second + first, KEY).mac
