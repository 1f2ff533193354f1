"""Writing a large file at the speed of the disk: past the page cache, while the next block is filled and summed."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpc_det.checkpoint.committed import FileEntry
from hpc_det.checkpoint.crc import crc32
from hpc_det.checkpoint.memory import copy_into
from hpc_det.node import disk, full_disk
from hpc_det.node.files import open_file
from hpc_det.store.direct import past_the_cache, write_at

BLOCK = 2 << 20
_BLOCKS = 2
"""One is filled while the others wait for the disk."""


class ChecksummedFile:
    """A file object, good enough for torch.save, that knows the checksum of what went through it."""

    def __init__(self, descriptor: int, disk: ThreadPoolExecutor, go_on: Callable[[], object]) -> None:
        self._descriptor = descriptor
        self._go_on = go_on
        self._disk = disk
        self._writes: deque[tuple[mmap.mmap, Future[None]]] = deque()
        self._block = mmap.mmap(-1, BLOCK)  # begins at a page
        self._filled = 0
        self._crc = 0
        self._size = 0
        """Of what was given to the disk."""
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
        for _, write in self._writes:
            write.result()
        disk.truncate(self._descriptor, self._size)  # the last page was written whole
        disk.flush(self._descriptor)

    @property
    def entry(self) -> FileEntry:
        return FileEntry(size=self._size, crc32=self._crc)

    def _take(self, rest: memoryview) -> None:
        while rest:
            part = rest[: BLOCK - self._filled]
            copy_into(self._block, self._filled, part)
            self._filled += part.nbytes
            rest = rest[part.nbytes :]
            if self._filled == BLOCK:
                self._hand_over()
                self._block = self._free_block()

    def _hand_over(self) -> None:
        self._go_on()
        block, filled = self._block, self._filled
        pages = memoryview(block)[: -(-filled // mmap.PAGESIZE) * mmap.PAGESIZE]
        write = self._disk.submit(write_at, self._descriptor, pages, self._size)
        self._writes.append((block, write))
        self._crc = crc32(memoryview(block)[:filled], self._crc)
        self._size += filled
        self._filled = 0

    def _free_block(self) -> mmap.mmap:
        if len(self._writes) < _BLOCKS:
            return mmap.mmap(-1, BLOCK)
        block, write = self._writes.popleft()
        write.result()
        return block


@contextmanager
def checksummed(path: Path, go_on: Callable[[], object] = lambda: None) -> Iterator[ChecksummedFile]:
    """Write `path`; flushed to disk when the block ends. `go_on` is asked before each block, and raises to end it."""
    with ExitStack() as stack:
        descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        stack.callback(os.close, descriptor)
        past_the_cache(descriptor)
        writer = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="disk"))
        file = ChecksummedFile(descriptor, writer, go_on)
        try:
            yield file
            file.finish()
        except OSError as error:
            error.filename = error.filename or str(path)  # what writes to a descriptor knows no name
            if error.errno in full_disk.CODES:  # notes of the failure need some space
                disk.unlink(path, missing_ok=True)
            raise
