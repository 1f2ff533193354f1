from __future__ import annotations

import errno
import fcntl
import mmap
import operator
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.reading import entry_of
from hpc_det.checkpoint.sealed_files import (
    SaveAbandoned,
    copy_into,
    is_past_the_cache,
    past_the_cache,
    sealed_file,
    write_at,
    write_sealed,
)
from hpc_det.checkpoint.seals import CRC, HmacSeal, Seal
from tests.facts import refused
from tests.wait import wait_for

BLOCK = CRC.written_bytes
HMAC = HmacSeal(bytes(range(32)))
SIZES = [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 13 * BLOCK + 5]


def content_of(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(size % 251)


@pytest.mark.parametrize("seal", [CRC, HMAC])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_has_what_was_written_and_the_entry_its_seal(tmp_path: Path, size: int, seal: Seal[Any]) -> None:
    content = content_of(size)
    with sealed_file(tmp_path / "file", seal) as file:
        for begin in range(0, size, 1_000_003):
            assert file.write(content[begin : begin + 1_000_003]) == len(content[begin : begin + 1_000_003])
    assert (tmp_path / "file").read_bytes() == content
    assert file.entry == entry_of(tmp_path / "file", seal)


@pytest.mark.parametrize(("seal", "is_in_the_filling_thread"), [(CRC, True), (HMAC, False)])
def test_only_a_slow_seal_is_computed_outside_the_thread_that_fills_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seal: Seal[Any], is_in_the_filling_thread: bool
) -> None:
    real, threads = seal.digest, []

    def digest(pieces: Iterable[memoryview]) -> Any:
        threads.append(threading.get_ident())
        return real(pieces)

    monkeypatch.setattr(seal, "digest", digest)
    with sealed_file(tmp_path / "file", seal) as file:
        file.write(content_of(3 * seal.written_bytes))
    assert len(threads) >= 3
    assert {thread == threading.get_ident() for thread in threads} == {is_in_the_filling_thread}


def test_a_tensor_of_any_type_is_written_in_bytes(tmp_path: Path) -> None:
    with sealed_file(tmp_path / "file", CRC) as file:
        file.write(memoryview(b"12345678").cast("q"))
    assert (tmp_path / "file").read_bytes() == b"12345678"


class WithoutDirect:
    """A file system without O_DIRECT, which refuses it when it is set, or, as some do, at the first write."""

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
    with sealed_file(tmp_path / "file", CRC) as file:
        file.write(content)
    assert without.refused >= 1
    assert (tmp_path / "file").read_bytes() == content
    assert file.entry == entry_of(tmp_path / "file", CRC)


def test_a_refusal_of_two_writes_at_once_ends_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, both, content = os.pwrite, threading.Barrier(2), content_of(2 * HMAC.written_bytes)

    def refused(descriptor: int, data: memoryview, offset: int) -> int:
        if is_past_the_cache(descriptor):
            both.wait(10)
            if offset:  # wait until the thread of the first block has switched O_DIRECT off
                wait_for(lambda: not is_past_the_cache(descriptor))
            raise OSError(22, "Invalid argument")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refused)
    with sealed_file(tmp_path / "file", HMAC) as file:
        file.write(content)
    assert (tmp_path / "file").read_bytes() == content


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
    with refused(OSError, f"'{path}'") as error, sealed_file(path, CRC) as file:
        file.write(content_of(9 * BLOCK))
    assert error.value.errno == errno.ENOSPC


def test_who_no_longer_wants_a_file_ends_it_at_the_next_block(tmp_path: Path) -> None:
    blocks = []

    def go_on() -> None:
        blocks.append(1)
        if len(blocks) == 3:
            raise SaveAbandoned

    with pytest.raises(SaveAbandoned), sealed_file(tmp_path / "file", CRC, go_on) as file:
        file.write(content_of(9 * BLOCK))
    assert len(blocks) == 3


def test_torch_does_not_hide_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with refused(OSError) as error, sealed_file(tmp_path / "file", CRC) as file:
        torch.save(torch.zeros(3 * BLOCK), file)  # type: ignore[arg-type]
    assert error.value.errno == errno.ENOSPC


# --- from memory, without a copy


@pytest.fixture
def memory() -> Iterator[memoryview]:
    """Yield memory that is aligned to a page, as O_DIRECT requires."""
    mapped = mmap.mmap(-1, len(LONG))
    mapped.write(LONG)
    with memoryview(mapped) as content:
        yield content


LONG = os.urandom(2**22 * 3 + 4321)


@pytest.mark.parametrize("seal", [CRC, HMAC])
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 0), (0, 1), (0, 4096), (0, 2**22), (0, 2**22 + 1), (0, None), (77, None)]
)
def test_memory_is_written_with_its_seal(
    memory: memoryview, tmp_path: Path, begin: int, end: int | None, seal: Seal[Any]
) -> None:
    found = write_sealed(tmp_path / "file", memory[begin:end], seal)
    assert (tmp_path / "file").read_bytes() == LONG[begin:end]
    assert found == entry_of(tmp_path / "file", seal)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_memory_that_nobody_wants_any_more_is_given_up(memory: memoryview, tmp_path: Path) -> None:
    asked = []

    def go_on() -> None:
        asked.append(True)
        if len(asked) > 2:
            raise SaveAbandoned

    with pytest.raises(SaveAbandoned):
        write_sealed(tmp_path / "file", memory, HMAC, go_on)
    assert (tmp_path / "file").stat().st_size < len(LONG)


def test_memory_takes_the_place_of_no_other_file(tmp_path: Path) -> None:
    write_sealed(tmp_path / "file", memoryview(b"state"), HMAC)
    with pytest.raises(FileExistsError):
        write_sealed(tmp_path / "file", memoryview(b"state"), HMAC)


# --- copies


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(b"abcd"), memoryview(b"0123456789")[3:7]])
def test_bytes_are_copied_to_their_place(data: bytes) -> None:
    memory = mmap.mmap(-1, 8192)
    copy_into(memory, 5, memoryview(data))
    assert memory[:20] == bytes(5) + bytes(data) + bytes(15 - len(data))
    memory.close()


def test_what_is_outside_is_refused() -> None:
    memory = mmap.mmap(-1, 4096)
    for offset in (-1, 4094):
        with refused(ValueError):
            copy_into(memory, offset, memoryview(b"abc"))


def test_other_threads_run_meanwhile() -> None:
    size = 1 << 22
    memory, data = mmap.mmap(-1, size), memoryview(os.urandom(size))
    assert others_steps(partial(operator.setitem, memory, slice(0, size), data)) == 0
    assert others_steps(partial(copy_into, memory, 0, data)) > 0


def others_steps(work: Callable[[], object]) -> int:
    """Return how often another thread ran during 200 calls of `work`; the interpreter switches no threads by time."""
    steps, ends = 0, threading.Event()

    def count() -> None:
        nonlocal steps
        while not ends.is_set():
            steps += 1
            time.sleep(0)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        meanwhile = 0
        for _ in range(200):
            before = steps
            work()
            meanwhile += steps - before
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(before_s)
    return meanwhile


# --- O_DIRECT


@pytest.fixture
def file() -> Iterator[int]:
    """Yield a file on a disk: a memory file system may have no O_DIRECT, and accepts unaligned writes."""
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
    with refused(OSError) as error:
        write_at(10**6, pages(b"x" * mmap.PAGESIZE), 0)
    assert error.value.errno == errno.EBADF
