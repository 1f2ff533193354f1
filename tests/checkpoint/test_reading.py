from __future__ import annotations

import errno
import mmap
import os
import random
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint import reading
from hpc_det.checkpoint.checkpoints import CheckpointContext
from hpc_det.checkpoint.committed import checksum, committed
from hpc_det.checkpoint.damaged import damaged_ones
from hpc_det.checkpoint.reading import Block, Found, blocks_of, differences, is_in_memory, read_blocks
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.distributed.collectives import Distributed
from hpc_det.node import disk
from tests.checkpoint.saved import saved
from tests.facts import refused, unnamed


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr("time.sleep", found.append)
    return found


def fail(monkeypatch: pytest.MonkeyPatch, call: str, code: int, times: int, about: str) -> None:
    """Let the first `times` calls of `os.CALL` raise, if their first argument is a descriptor or contains `about`."""
    former: Callable[..., Any] = getattr(os, call)
    left = [times]

    def failing(first: Any, *arguments: Any, **options: Any) -> Any:
        if left[0] and (call == "preadv" or about in str(first)):
            left[0] -= 1
            raise OSError(code, os.strerror(code), first)
        return former(first, *arguments, **options)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
@pytest.mark.parametrize("call", ["preadv", "open", "scandir", "lstat"])
def test_the_newest_one_is_taken_when_an_error_has_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], call: str, code: int
) -> None:
    saved(tmp_path, 10)
    newest = saved(tmp_path, 20)
    about = f"{newest.uuid}/manifest.json" if call == "open" else newest.uuid
    fail(monkeypatch, call, code, 1, about)
    assert CheckpointContext(tmp_path, Distributed()).newest() == (newest.path, 20)
    assert damaged_ones(tmp_path) == []
    assert pauses == [reading.PAUSE_S]


def test_one_that_comes_again_sets_it_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    fail(monkeypatch, "scandir", errno.EIO, 2, newest.uuid)
    assert CheckpointContext(tmp_path, Distributed()).newest() == (earlier.path, 10)
    assert [found.uuid for found in damaged_ones(tmp_path)] == [newest.uuid]


def test_wrong_content_is_not_read_again(tmp_path: Path, pauses: list[float]) -> None:
    saved(tmp_path, 10)
    (saved(tmp_path, 20).path / "state.pt").unlink()
    (saved(tmp_path, 30).path / "state.pt").write_bytes(b"weights" * 29 + b"Weights")
    (saved(tmp_path, 40).path / "manifest.json").write_text("{}")
    found = CheckpointContext(tmp_path, Distributed()).newest()
    assert found
    assert found[1] == 10
    assert pauses == []


def full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_keep_a_damaged_one_from_being_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, newest = saved(tmp_path, 10), saved(tmp_path, 20)
    (newest.path / "state.pt").write_bytes(b"")
    monkeypatch.setattr(disk, "write", full)
    assert CheckpointContext(tmp_path, Distributed()).newest() == (earlier.path, 10)
    assert [found.steps for found in committed(tmp_path)] == [10]
    assert [found.uuid for found in damaged_ones(tmp_path)] == [newest.uuid]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE])
def test_one_that_cannot_be_renamed_now_is_no_mistake_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A user's error would end the trial."""

    def fails(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    (saved(tmp_path, 20).path / "state.pt").write_bytes(b"")
    monkeypatch.setattr(disk, "rename", fails)
    with refused(OSError) as raised:
        CheckpointContext(tmp_path, Distributed()).newest()
    assert raised.value.errno == code


SIZES = {"empty": 0, "short": 5, "whole blocks": 200, "code/longer": 1234}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FileEntry]:
    """Write files that are checksummed in blocks of 100 bytes and read in pieces of 30 bytes."""
    monkeypatch.setattr(CRC, "read_bytes", 100)
    monkeypatch.setattr(reading, "_PIECE_BYTES", 30)
    (tmp_path / "code").mkdir()
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(random.Random(name).randbytes(size))
    return {name: checksum(tmp_path / name) for name in SIZES}


def found_in(folder: Path, files: dict[str, FileEntry]) -> list[tuple[Block, Found]]:
    blocks = blocks_of(files, CRC)
    return list(zip(blocks, read_blocks(folder, files, blocks, CRC), strict=True))


def test_files_that_are_as_they_were_have_no_difference(tmp_path: Path, files: dict[str, FileEntry]) -> None:
    found = found_in(tmp_path, files)
    assert len(found) == 1 + 1 + 2 + 13
    random.Random(1).shuffle(found)  # as if several readers had read them
    assert differences(files, found, CRC) == {}


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size])
def test_any_flipped_bit_is_seen(tmp_path: Path, files: dict[str, FileEntry], name: str) -> None:
    whole = (tmp_path / name).read_bytes()
    for place in random.Random(name).sample(range(len(whole)), k=min(len(whole), 20)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        (tmp_path / name).write_bytes(flipped)
        said = {name: f"crc32 {zlib.crc32(flipped):08x}, the manifest says {files[name].crc32:08x}"}
        assert differences(files, found_in(tmp_path, files), CRC) == said


def test_every_file_that_differs_is_named_once(tmp_path: Path, files: dict[str, FileEntry]) -> None:
    (tmp_path / "empty").unlink()
    (tmp_path / "short").write_bytes(b"")
    (tmp_path / "code" / "longer").write_bytes(bytes(1000))
    named: dict[str, list[object]] = {
        "empty": [os.strerror(errno.ENOENT)],
        "short": ["0 bytes", 5],
        "code/longer": ["1000 bytes", 1234],
    }
    found = differences(files, found_in(tmp_path, files), CRC)
    assert sorted(found) == sorted(named)
    assert [unnamed(found[name], *facts) for name, facts in named.items()] == [[], [], []]


def test_a_block_that_nobody_has_read_does_not_pass(tmp_path: Path, files: dict[str, FileEntry]) -> None:
    with pytest.raises(KeyError):
        differences(files, found_in(tmp_path, files)[:-1], CRC)


MIB = 1 << 20


def test_a_file_is_in_memory_when_all_of_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    with file.open("wb", buffering=0) as opened:
        opened.truncate(4 * MIB)  # a hole is never in memory, neither on a disk nor on a memory file system
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
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as opened:  # a disk: memory file systems do not evict
        opened.write(os.urandom(8 * MIB))
        opened.flush()
        os.fsync(opened.fileno())
        for megabyte in range(8):
            os.posix_fadvise(opened.fileno(), megabyte * MIB, 4 * mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)
        assert is_in_memory(Path(opened.name))
