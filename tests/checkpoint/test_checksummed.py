from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpc_det.checkpoint.checksummed import BLOCK, checksummed
from hpc_det.checkpoint.committed import checksum
from hpc_det.store.direct import is_past_the_cache

SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 7 * BLOCK + 5]


def content_of(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_what_was_written_and_the_entry_its_checksum(tmp_path: Path, size: int) -> None:
    content = content_of(size)
    with checksummed(tmp_path / "file") as file:
        for begin in range(0, size, 1_000_003):
            assert file.write(content[begin : begin + 1_000_003]) == len(content[begin : begin + 1_000_003])
    assert (tmp_path / "file").read_bytes() == content
    assert file.entry == checksum(tmp_path / "file")


def test_a_tensor_of_any_type_is_written_in_bytes(tmp_path: Path) -> None:
    with checksummed(tmp_path / "file") as file:
        file.write(memoryview(b"12345678").cast("q"))
    assert (tmp_path / "file").read_bytes() == b"12345678"


class WithoutDirect:
    """A file system without O_DIRECT, which refuses it when it is set, or at the first write as some do."""

    def __init__(self, patch: pytest.MonkeyPatch, where: object, call: str) -> None:
        self.refused = 0
        self._real: Callable[..., int] = getattr(where, call)
        patch.setattr(where, call, getattr(self, call))

    def fcntl(self, descriptor: int, command: int, flags: int = 0) -> int:
        self._check(command == fcntl.F_SETFL and bool(flags & os.O_DIRECT))
        return self._real(descriptor, command, flags)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self._check(is_past_the_cache(descriptor))
        return self._real(descriptor, data, offset)

    def _check(self, is_direct: bool) -> None:
        if is_direct:
            self.refused += 1
            raise OSError(22, "Invalid argument")


@pytest.mark.parametrize(("where", "call"), [(fcntl, "fcntl"), (os, "pwrite")])
def test_a_file_system_that_writes_through_its_cache_alone_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, call: str
) -> None:
    without, content = WithoutDirect(monkeypatch, where, call), content_of(3 * BLOCK + 77)
    with checksummed(tmp_path / "file") as file:
        file.write(content)
    assert without.refused >= 1
    assert (tmp_path / "file").read_bytes() == content
    assert file.entry == checksum(tmp_path / "file")


@pytest.mark.parametrize("at", [0, 5])
def test_a_disk_that_is_full_is_an_error_of_whoever_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    real, writes = os.pwrite, []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        writes.append(offset)
        if len(writes) > at:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    path = tmp_path / "file"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), checksummed(path) as file:
        file.write(content_of(9 * BLOCK))


def test_who_no_longer_wants_a_file_ends_it_at_the_next_block(tmp_path: Path) -> None:
    blocks = []

    def go_on() -> None:
        blocks.append(1)
        if len(blocks) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError), checksummed(tmp_path / "file", go_on) as file:
        file.write(content_of(9 * BLOCK))
    assert len(blocks) == 3


def test_torch_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"), checksummed(tmp_path / "file") as file:
        torch.save(torch.zeros(3 * BLOCK), file)  # type: ignore[arg-type]
