"""Read the files of a committed folder once, in large blocks, and compute their digests.

Threads, ranks and nodes can share the blocks and read them in any order: see `seals`. Reading a file puts it into the
page cache of the node, so that the file can be mapped afterwards without waiting for the disk. Reading it page by page
through a map is many times slower on a parallel file system (350 KB/s on a Lustre with 13 MB/s for sequential reads,
github.com/Garden-AI/rootstock issue 167).

Some read errors are temporary: a file server is busy or restarts, or the process has too many open files. They do not
mean damage, so reading is tried a second time, after a pause.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from hpc_det.checkpoint.seals import Digest, E, Entry, Seal

_PIECE_BYTES = 1 << 20
"""Bytes of one read; still in the core's cache when its digest is computed."""
_THREADS = 4
"""Threads that read blocks and compute digests; both release the GIL."""
PAUSE_S = 3.0
"""Seconds before reading is tried a second time."""
# Error numbers that are about the content of the folder and its permissions; all others may be temporary.
_OF_CONTENT = (
    None,  # an OSError that this module raises
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
)

T = TypeVar("T")


class Block(NamedTuple):
    """A part of a file: the name of the file, and offset and size in bytes."""

    name: str
    offset: int
    size: int


Found = Digest | str
"""The digest of a block, or the problem of its file."""


def blocks_of(files: Mapping[str, Entry], seal: Seal[Any]) -> list[Block]:
    """Return the blocks of `files`. An empty file has an empty block, so that its existence is checked."""
    return [block for name, entry in files.items() for block in _blocks(name, entry.size, seal)]


def _blocks(name: str, size: int, seal: Seal[Any]) -> list[Block]:
    step = seal.read_bytes
    return [Block(name, offset, min(step, size - offset)) for offset in range(0, max(size, 1), step)]


def read_blocks(folder: Path, files: Mapping[str, E], blocks: Iterable[Block], seal: Seal[E]) -> list[Found]:
    """Return the digest of each of `blocks`, or the problem of its file; after a temporary error, read it again."""
    every, read = list(blocks), partial(_read, folder, files, seal)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(every, pool.map(read, every), strict=True))
        again = [block for block, each in found.items() if isinstance(each, OSError) and may_pass(each)]
        if again:
            pause()
            found |= zip(again, pool.map(read, again), strict=True)
    return [str(each.strerror) if isinstance(each, OSError) else each for each in map(found.__getitem__, every)]


def _read(folder: Path, files: Mapping[str, E], seal: Seal[E], block: Block) -> Found | OSError:
    try:
        with open_regular(folder / block.name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != files[block.name].size:
                return f"{size} bytes, the manifest says {files[block.name].size}"
            return seal.digest(_pieces(file.fileno(), block))
    except OSError as error:
        return error


def _pieces(file: int, block: Block) -> Iterator[memoryview]:
    """Yield the content of the block in pieces; each piece overwrites the memory of the previous one."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, block.size)))
    offset, end = block.offset, block.offset + block.size
    while offset < end:
        count = os.preadv(file, [piece[: end - offset]], offset)
        if not count:  # truncated since its size was read
            raise OSError(None, f"the file ends after {offset} bytes")
        yield piece[:count]
        offset += count


def differences(files: Mapping[str, E], found: Iterable[tuple[Block, Found]], seal: Seal[E]) -> dict[str, str]:
    """Return the problems of `files` by name: read errors, or differences from the manifest.

    Raises KeyError if a block of a file is not in `found`.
    """
    known = {(block.name, block.offset): each for block, each in found}
    problems = {}
    for name, entry in files.items():
        blocks = _blocks(name, entry.size, seal)
        results = [known[name, block.offset] for block in blocks]
        problem = next((each for each in results if isinstance(each, str)), None)
        sizes = [block.size for block in blocks]
        problems[name] = problem or seal.difference(entry, seal.entry(zip(sizes, results, strict=True)))
    return {name: problem for name, problem in problems.items() if problem}


def entry_of(path: Path, seal: Seal[E]) -> E:
    """Return the manifest entry of a file as it is now. Raises OSError, also if it is not a regular file."""
    with open_regular(path) as file:
        blocks = _blocks(path.name, os.fstat(file.fileno()).st_size, seal)
        return seal.entry((block.size, seal.digest(_pieces(file.fileno(), block))) for block in blocks)


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def kind_of(mode: int) -> str:
    """Return the type of a file with this mode, for messages."""
    return _KINDS.get(stat.S_IFMT(mode), "a file of unknown type")


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a symbolic link, and for anything but a regular file."""
    # O_NONBLOCK: without it, opening a FIFO waits for a writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{kind_of(mode)}, not a regular file", str(path))
    return open(descriptor, "rb")


# --- temporary errors


def may_pass(error: OSError) -> bool:
    """Return whether the error may be temporary: it is not about the content of the folder or its permissions."""
    return error.errno not in _OF_CONTENT


def pause() -> None:
    time.sleep(PAUSE_S)


def tried_twice(read: Callable[[], T]) -> T:
    """Return the result of `read`, which is called a second time after an error that may be temporary."""
    try:
        return read()
    except OSError as error:
        if not may_pass(error):
            raise
    pause()
    return read()


# --- the page cache of this node

_READ_AGAIN = 0.05
"""Largest share of missing pages that are read again; a larger share is not missing by chance."""
_MISSING = 0.001
"""Largest share of pages that may be missing after that; the kernel may evict a few pages at any time."""


def is_in_memory(path: Path) -> bool:
    """Return whether the page cache contains a file, so that mapping it needs no more memory and no disk.

    A few missing pages are read again first. The result is False if the file system has its own cache or none, such as
    GPFS and BeeGFS, or if memory is short, even if the file was just read. Raises OSError if it cannot be opened.
    """
    with path.open("rb", buffering=0) as file:
        pages = path.stat().st_size / mmap.PAGESIZE
        missing = _missing_pages(file)
        if not pages or len(missing) > _READ_AGAIN * pages:
            return False
        for page in missing:
            os.pread(file.fileno(), mmap.PAGESIZE, page * mmap.PAGESIZE)
        return not missing or len(_missing_pages(file)) <= _MISSING * pages


def _missing_pages(file: FileIO) -> list[int]:
    """Return the numbers of the pages that are not in the page cache (mincore(2))."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        return []
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:  # from_buffer needs writable memory
        first = ctypes.c_char.from_buffer(pages)
        there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), there)
        del first  # the map cannot be closed while it is referenced
    return [number for number, is_there in enumerate(bytes(there)) if failed or not is_there]
