"""Writing large files at the speed of the disk: past the page cache, and sealed on the way (see `seals`).

Past the page cache (O_DIRECT, open(2)) no second copy takes up memory, nor has to be made before the disk begins to
write, and what others read from the cache stays there. It takes whole pages, from memory that begins with one. File
systems without it, and what is no whole page, get plain writes.
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
"""For a seal that is slow: some make digests while another one writes."""

GoOn = Callable[[], object]
"""Called before each block is written; raises, for instance SaveAbandoned, to end the file."""


class SaveAbandoned(Exception):
    """Nobody wants this checkpoint or snapshot any more."""


def _always() -> None:
    pass


@contextmanager
def sealed_file(path: Path, seal: Seal[E], go_on: GoOn = _always) -> Iterator[SealedFile[E]]:
    """Write `path`, or replace what it contains; it is flushed to disk when the block ends."""
    with _blocks_of(path, os.O_TRUNC, seal, go_on) as blocks:
        file = SealedFile(blocks, seal.written_bytes)
        yield file
        file.finish()


def write_sealed(path: Path, content: memoryview, seal: Seal[E], go_on: GoOn = _always) -> E:
    """Write `content` to a new file, and flush it to disk; fastest from memory that begins with a page.

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
        error.filename = error.filename or str(path)  # what writes to a descriptor knows no name
        if error.errno in full_disk.CODES:  # notes of the failure need some space
            disk.unlink(path, missing_ok=True)
        raise
    finally:
        os.close(descriptor)


class _Blocks(Generic[E]):
    """The blocks of a file on their way to the disk: `at_once` of them, while the next one is filled."""

    def __init__(self, descriptor: int, seal: Seal[E], threads: ThreadPoolExecutor, at_once: int, go_on: GoOn) -> None:
        self.at_once = at_once
        self._descriptor = descriptor
        self._seal = seal
        self._threads = threads
        self._go_on = go_on
        self._size = 0
        self._sealed: list[tuple[int, Digest]] = []
        self._on_their_way: deque[tuple[int, Future[None], Callable[[], Digest]]] = deque()

    def add(self, block: memoryview) -> None:
        """Its memory must not change until `at_once` more blocks were added, or all is finished."""
        self._go_on()
        written = self._threads.submit(self._write, block, self._size)
        self._on_their_way.append((len(block), written, self._digest(block)))
        self._size += len(block)
        if len(self._on_their_way) > self.at_once:
            self._await_oldest()

    def finish(self) -> E:
        """All of it is on disk; the entry of the file. Raises OSError where it is not."""
        while self._on_their_way:
            self._await_oldest()
        disk.flush(self._descriptor)
        return self._seal.entry(self._sealed)

    def _await_oldest(self) -> None:
        size, written, digest = self._on_their_way.popleft()
        written.result()
        self._sealed.append((size, digest()))

    def _digest(self, block: memoryview) -> Callable[[], Digest]:
        if self._seal.is_slow:
            return self._threads.submit(self._seal.digest, [block]).result
        digest = self._seal.digest([block])  # here, where the block is still in the cache of this core
        return lambda: digest

    def _write(self, block: memoryview, offset: int) -> None:
        whole = len(block) // mmap.PAGESIZE * mmap.PAGESIZE
        write_at(self._descriptor, block[:whole], offset)
        write_at(self._descriptor, block[whole:], offset + whole)


class SealedFile(Generic[E]):
    """A file object, good enough for torch.save; its entry is there when all was written."""

    entry: E

    def __init__(self, blocks: _Blocks[E], block_bytes: int) -> None:
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._memory: deque[mmap.mmap] = deque()
        """Of blocks that were handed over, the oldest first."""
        self._block = mmap.mmap(-1, block_bytes)  # begins at a page
        self._filled = 0
        self._error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """What goes wrong is raised by `finish`: torch.save would hide it behind an error of its own."""
        if self._error is None:
            try:
                self._take(memoryview(data).cast("B"))
            except BaseException as error:
                self._error = error
        return memoryview(data).nbytes

    def flush(self) -> None:
        pass

    def finish(self) -> None:
        """All of it is on disk. Raises OSError where it is not."""
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


# --- copies in memory during which other threads of this process run: slices of a memoryview keep them waiting


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
"""PyBUF_SIMPLE: bytes one after the other."""


def copy_into(memory: mmap.mmap, offset: int, data: memoryview) -> None:
    """All of `data`, which may be read-only, to `offset` bytes from the beginning of `memory`.

    Raises ValueError where it has no room there.
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
    """Where the file system lets it; some refuse it here, others at the first write, with EINVAL."""
    with suppress(OSError):
        _set_flags(descriptor, _flags(descriptor) | os.O_DIRECT)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`. Raises OSError."""
    while data:
        was_past_the_cache = is_past_the_cache(descriptor)  # another thread may end that in the meantime
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
