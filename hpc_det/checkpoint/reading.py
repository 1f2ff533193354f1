"""Reading the files of a committed folder once, in large blocks, and checking them on the way.

Blocks can be read in any order, by threads, ranks and nodes that share them: see `seals`. What was read is in the page
cache of its node, where a file that is mapped afterwards is found. To wait for a parallel file system page by page is
many times slower (350 KB/s on a Lustre that gave 13 MB/s in sequence, github.com/Garden-AI/rootstock issue 167).

Some errors of reading pass: of a file server that is busy or came back, of a process with too many open files. They say
nothing about what a folder holds, so reading is tried once more, after a pause.
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
"""Still in the core's cache when its digest is made."""
_THREADS = 4
"""A digest is made while another thread's block is on its way; Python holds neither of them up."""
PAUSE_S = 3.0
"""Seconds before reading is tried once more."""
_OF_CONTENT = (
    None,  # of hpc_det, about the content
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
)

T = TypeVar("T")


class Block(NamedTuple):
    """A part of a file, by its name."""

    name: str
    offset: int
    size: int


Found = Digest | str
"""The digest of a block, or what is wrong with its file."""


def blocks_of(files: Mapping[str, Entry], seal: Seal[Any]) -> list[Block]:
    """The blocks of `files`. An empty file has an empty one, since somebody has to see that the file is there."""
    return [block for name, entry in files.items() for block in _blocks(name, entry.size, seal)]


def _blocks(name: str, size: int, seal: Seal[Any]) -> list[Block]:
    step = seal.read_bytes
    return [Block(name, offset, min(step, size - offset)) for offset in range(0, max(size, 1), step)]


def read_blocks(folder: Path, files: Mapping[str, E], blocks: Iterable[Block], seal: Seal[E]) -> list[Found]:
    """What was found in each of `blocks`, some of those of `files`. Where an error may pass, it is read once more."""
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
    """The content of the block; each piece takes the memory of the one before."""
    piece = memoryview(bytearray(min(_PIECE_BYTES, block.size)))
    offset, end = block.offset, block.offset + block.size
    while offset < end:
        count = os.preadv(file, [piece[: end - offset]], offset)
        if not count:
            raise OSError(None, f"ends at {offset} bytes")
        yield piece[:count]
        offset += count


def differences(files: Mapping[str, E], found: Iterable[tuple[Block, Found]], seal: Seal[E]) -> dict[str, str]:
    """What differs from the manifest, by the name of the file. Raises KeyError where a block was not read."""
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
    """What a manifest says about the file as it is now. Raises OSError for a link and for what is no regular file."""
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
    """What a file of this mode is, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def open_regular(path: Path) -> BinaryIO:
    """For reading. Raises OSError for a link and for what is no regular file; it never waits for a FIFO's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{kind_of(mode)}, and no regular file", str(path))
    return open(descriptor, "rb")


# --- errors that may pass


def may_pass(error: OSError) -> bool:
    """Whether it is not about what the folder holds, and who may read it."""
    return error.errno not in _OF_CONTENT


def pause() -> None:
    time.sleep(PAUSE_S)


def tried_twice(read: Callable[[], T]) -> T:
    """What `read` returns, the second time where an error came that may pass. Raises what it raises then."""
    try:
        return read()
    except OSError as error:
        if not may_pass(error):
            raise
    pause()
    return read()


# --- what this node has in memory

_READ_AGAIN = 0.05
"""Of the pages; more are not missing by chance."""
_MISSING = 0.001
"""These may be put out again at any time; each is read at a fault of its own."""


def is_in_memory(path: Path) -> bool:
    """Whether the page cache has a file: then to map it takes no memory more, and waits for no disk.

    What little is missing is read again. Where the file system has a cache of its own or none, as GPFS and BeeGFS, the
    page cache has not even what was just read, nor where memory is short. Raises OSError where it cannot be opened.
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
    """The numbers of those that the page cache has not, by mincore(2)."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        return []
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:  # ctypes takes what can be written
        first = ctypes.c_char.from_buffer(pages)
        there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), there)
        del first  # else the map cannot be closed
    return [number for number, is_there in enumerate(bytes(there)) if failed or not is_there]
