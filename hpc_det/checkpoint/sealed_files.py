"""Write large files at disk speed, bypassing the page cache, and compute their seals meanwhile (see `seals`).

O_DIRECT (open(2)) bypasses the page cache: it saves the memory and the time of a second copy, and evicts no pages that
other processes have cached. It writes whole pages from page-aligned memory. A partial last page, and file systems
without O_DIRECT, get buffered writes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic

from hpc_det.checkpoint.seals import Digest, E, Seal
from hpc_det.node import disk, full_disk
from hpc_det.node.files import open_file

_SLOW_THREADS = 3
"""Threads per file for a slow seal: some compute digests while another one writes."""

GoOn = Callable[[], object]
"""Called before each block is written; it may raise, for instance SaveAbandoned, to cancel the file."""


class SaveAbandoned(Exception):
    """The save of a checkpoint or snapshot was cancelled, for instance because a newer one replaces it."""


def _always() -> None:
    pass


@contextmanager
def sealed_file(path: Path, seal: Seal[E], go_on: GoOn = _always) -> Iterator[SealedFile[E]]:
    """Create or overwrite `path`; the file is flushed to disk when the `with` block exits."""
    with _blocks_of(path, os.O_TRUNC, seal, go_on) as blocks:
        file = SealedFile(blocks, seal.written_bytes)
        yield file
        file.finish()


def write_sealed(path: Path, content: memoryview, seal: Seal[E], go_on: GoOn = _always) -> E:
    """Write `content` to a new file, and flush it to disk; page-aligned memory is fastest.

    The content is not copied before it is written. Raises FileExistsError.
    """
    with _blocks_of(path, os.O_EXCL, seal, go_on) as blocks:
        for offset in range(0, len(content), seal.written_bytes):
            blocks.add(content[offset : offset + seal.written_bytes])
        return blocks.finish()


@contextmanager
def _blocks_of(path: Path, flags: int, seal: Seal[E], go_on: GoOn) -> Iterator[_Blocks[E]]:
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | flags)
    try:
        past_the_cache(descriptor)
        at_once = _SLOW_THREADS if seal.is_slow else 1
        with ThreadPoolExecutor(at_once, thread_name_prefix="disk") as threads:
            yield _Blocks(descriptor, seal, threads, at_once, go_on)
    except OSError as error:
        error.filename = error.filename or str(path)  # calls on a descriptor raise errors without a name
        if error.errno in full_disk.CODES:  # frees the space, which the record of this failure needs
            disk.unlink(path, missing_ok=True)
        raise
    finally:
        os.close(descriptor)


class _Blocks(Generic[E]):
    """Writes and seals the blocks of a file: up to `at_once` are pending while the caller fills the next one."""

    def __init__(self, descriptor: int, seal: Seal[E], threads: ThreadPoolExecutor, at_once: int, go_on: GoOn) -> None:
        self.at_once = at_once
        self._descriptor = descriptor
        self._seal = seal
        self._threads = threads
        self._go_on = go_on
        self._size = 0
        self._sealed: list[tuple[int, Digest]] = []
        self._pending: deque[tuple[int, Future[None], Callable[[], Digest]]] = deque()

    def add(self, block: memoryview) -> None:
        """Queue `block`. Its memory must not change until `at_once` more blocks were added or `finish` has returned."""
        self._go_on()
        written = self._threads.submit(self._write, block, self._size)
        self._pending.append((len(block), written, self._digest(block)))
        self._size += len(block)
        if len(self._pending) > self.at_once:
            self._await_oldest()

    def finish(self) -> E:
        """Wait for all writes, flush the file, and return its entry. Raises OSError if a write failed."""
        while self._pending:
            self._await_oldest()
        disk.flush(self._descriptor)
        return self._seal.entry(self._sealed)

    def _await_oldest(self) -> None:
        size, written, digest = self._pending.popleft()
        written.result()
        self._sealed.append((size, digest()))

    def _digest(self, block: memoryview) -> Callable[[], Digest]:
        if self._seal.is_slow:
            return self._threads.submit(self._seal.digest, [block]).result
        digest = self._seal.digest([block])  # in this thread: its core still has the block in its cache
        return lambda: digest

    def _write(self, block: memoryview, offset: int) -> None:
        whole = len(block) // mmap.PAGESIZE * mmap.PAGESIZE
        write_at(self._descriptor, block[:whole], offset)
        write_at(self._descriptor, block[whole:], offset + whole)


class SealedFile(Generic[E]):
    """A writable file object for torch.save. `entry` is set by `finish`."""

    entry: E

    def __init__(self, blocks: _Blocks[E], block_bytes: int) -> None:
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._memory: deque[mmap.mmap] = deque()
        """Memory of the queued blocks, oldest first."""
        self._block = mmap.mmap(-1, block_bytes)  # begins at a page
        self._filled = 0
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Copy `data`. Errors are raised by `finish` instead, because torch.save would mask them with another error."""
        if self._error is None:
            try:
                self._take(memoryview(data).cast("B"))
            except BaseException as error:
                self._error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        """Write the last block, flush the file, and set `entry`. Raises OSError if a write failed."""
        if self._error:
            raise self._error
        self._hand_over()
        self.entry = self._blocks.finish()

    def _take(self, rest: memoryview) -> None:
        while rest:
            part = rest[: self._block_bytes - self._filled]
            copy_into(self._block, self._filled, part)
            self._filled += part.nbytes
            rest = rest[part.nbytes :]
            if self._filled == self._block_bytes:
                self._hand_over()
                self._block, self._filled = self._free_block(), 0

    def _hand_over(self) -> None:
        self._blocks.add(memoryview(self._block)[: self._filled])
        self._memory.append(self._block)

    def _free_block(self) -> mmap.mmap:
        return self._memory.popleft() if len(self._memory) > self._blocks.at_once else mmap.mmap(-1, self._block_bytes)


# --- copies in memory without holding the GIL, which assigning a slice of a memoryview holds


class _Buffer(ctypes.Structure):
    """Py_buffer, part of Python's stable interface (its C API, "Buffer Protocol")."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE = 0
"""PyBUF_SIMPLE: a contiguous buffer of bytes."""


def copy_into(memory: mmap.mmap, offset: int, data: memoryview) -> None:
    """Copy all of `data`, which may be read-only, into `memory`, beginning at byte `offset`.

    Raises ValueError if it does not fit.
    """
    if offset < 0 or offset + data.nbytes > len(memory):
        raise ValueError(f"{data.nbytes} bytes at {offset} are outside of {len(memory)} bytes")
    source = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(source), _SIMPLE)
    try:
        target = ctypes.c_char.from_buffer(memory, offset) if data.nbytes else None
        if target is not None:
            ctypes.memmove(ctypes.addressof(target), source.buf, source.len)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(source))


# --- O_DIRECT


def past_the_cache(descriptor: int) -> None:
    """Set O_DIRECT if the file system supports it. Some reject it here, others with EINVAL at the first write."""
    with suppress(OSError):
        _set_flags(descriptor, _flags(descriptor) | os.O_DIRECT)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; without O_DIRECT if the file system rejects it. Raises OSError."""
    while data:
        was_past_the_cache = is_past_the_cache(descriptor)  # another thread may remove the flag meanwhile
        try:
            written = disk.write_at(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_past_the_cache:
                raise
            _set_flags(descriptor, _flags(descriptor) & ~os.O_DIRECT)
            continue
        data, offset = data[written:], offset + written


def is_past_the_cache(descriptor: int) -> bool:
    return bool(_flags(descriptor) & os.O_DIRECT)


def _flags(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def _set_flags(descriptor: int, flags: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
