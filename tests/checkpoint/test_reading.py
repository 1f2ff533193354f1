from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_det.checkpoint import reading
from hpc_det.checkpoint.committed import FileEntry, checksum
from hpc_det.checkpoint.reading import Block, Found, blocks_of, checksum_of_both, differences, read_blocks

SIZES = {"empty": 0, "short": 5, "whole blocks": 200, "code/longer": 1234}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FileEntry]:
    """In blocks of 100 bytes, which are read in pieces of 30."""
    monkeypatch.setattr(reading, "BLOCK_BYTES", 100)
    monkeypatch.setattr(reading, "_PIECE_BYTES", 30)
    (tmp_path / "code").mkdir()
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(random.Random(name).randbytes(size))
    return {name: checksum(tmp_path / name) for name in SIZES}


def found_in(folder: Path, files: dict[str, FileEntry]) -> list[tuple[Block, Found]]:
    blocks = blocks_of(files)
    return list(zip(blocks, read_blocks(folder, files, blocks), strict=True))


@given(st.binary(), st.binary())
def test_the_checksum_of_two_parts_is_that_of_the_whole(first: bytes, second: bytes) -> None:
    both = checksum_of_both(zlib.crc32(first), zlib.crc32(second), len(second))
    assert both == zlib.crc32(first + second)


def test_the_checksum_of_parts_of_any_length() -> None:
    zeros = bytes(1 << 20)
    crc, length = zlib.crc32(b"a"), 0
    for _ in range(4096):
        crc, length = checksum_of_both(crc, zlib.crc32(zeros), len(zeros)), length + len(zeros)
    once = checksum_of_both(zlib.crc32(b"a"), 0, 0)
    assert once == zlib.crc32(b"a")
    nothing = checksum_of_both(0, zlib.crc32(zeros), len(zeros))
    assert nothing == zlib.crc32(zeros)
    four_gib_of_zeros = 0
    for _ in range(4096):
        four_gib_of_zeros = checksum_of_both(four_gib_of_zeros, zlib.crc32(zeros), len(zeros))
    assert crc == checksum_of_both(zlib.crc32(b"a"), four_gib_of_zeros, length)


def test_files_that_are_as_they_were_have_no_difference(tmp_path: Path, files: dict[str, FileEntry]) -> None:
    found = found_in(tmp_path, files)
    assert len(found) == 1 + 1 + 2 + 13
    random.Random(1).shuffle(found)  # as if many had read them
    assert differences(files, found) == {}


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size])
def test_any_flipped_bit_is_seen(tmp_path: Path, files: dict[str, FileEntry], name: str) -> None:
    whole = (tmp_path / name).read_bytes()
    for place in random.Random(name).sample(range(len(whole)), k=min(len(whole), 20)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        (tmp_path / name).write_bytes(flipped)
        said = {name: f"crc32 {zlib.crc32(flipped):08x}, the manifest says {files[name].crc32:08x}"}
        assert differences(files, found_in(tmp_path, files)) == said


def test_every_file_that_differs_is_named_once(tmp_path: Path, files: dict[str, FileEntry]) -> None:
    (tmp_path / "empty").unlink()
    (tmp_path / "short").write_bytes(b"")
    (tmp_path / "code" / "longer").write_bytes(bytes(1000))
    assert differences(files, found_in(tmp_path, files)) == {
        "empty": "No such file or directory",
        "short": "0 bytes, the manifest says 5",
        "code/longer": "1000 bytes, the manifest says 1234",
    }


def test_a_block_that_nobody_has_read_does_not_pass(tmp_path: Path, files: dict[str, FileEntry]) -> None:
    with pytest.raises(KeyError):
        differences(files, found_in(tmp_path, files)[:-1])
