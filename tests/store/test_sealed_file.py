from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_det.store.sealed_file import copy_sealed, seal, seal_of

KEY = bytes(range(32))
LONG = os.urandom(2**22 + 4321)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("state")
    os.write(descriptor, LONG)
    yield descriptor
    os.close(descriptor)


def test_a_file_in_memory_is_copied_with_its_seal(memory: int, tmp_path: Path) -> None:
    sealed = copy_sealed(memory, tmp_path / "copy", KEY)
    assert (tmp_path / "copy").read_bytes() == LONG
    assert sealed == seal_of(tmp_path / "copy", KEY) == seal(LONG, KEY)
    assert sealed.size == len(LONG)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


def test_whoever_shares_the_descriptor_notices_nothing(memory: int, tmp_path: Path) -> None:
    os.lseek(memory, 10, os.SEEK_SET)
    copy_sealed(memory, tmp_path / "copy", KEY)
    assert os.read(memory, 5) == LONG[10:15]


def test_no_copy_takes_the_place_of_another(memory: int, tmp_path: Path) -> None:
    copy_sealed(memory, tmp_path / "copy", KEY)
    with pytest.raises(FileExistsError):
        copy_sealed(memory, tmp_path / "copy", KEY)


def test_an_empty_file_has_a_seal_too(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert seal_of(tmp_path / "empty", KEY) == seal(b"", KEY)


def test_a_seal_shows_one_changed_bit_and_another_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(LONG)
    before = seal_of(tmp_path / "file", KEY)
    assert seal_of(tmp_path / "file", KEY[::-1]).mac != before.mac
    changed = bytearray(LONG)
    changed[-1] ^= 1
    (tmp_path / "file").write_bytes(changed)
    assert seal_of(tmp_path / "file", KEY).mac != before.mac
