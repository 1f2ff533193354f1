"""Reading a checkpoint's files once, in large blocks, and checking them on the way.

Every block has a checksum of its own, and those of a file make up the file's: so blocks can be read in any order, by
threads, ranks and nodes that share them. What was read is in the page cache of its node, where a file that is mapped
afterwards is found. To wait for a parallel file system page by page is many times slower (350 KB/s on a Lustre that
gave 13 MB/s in sequence, github.com/Garden-AI/rootstock issue 167).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from hpc_det.checkpoint.crc import crc32
from hpc_det.checkpoint.inspection import kind_of
from hpc_det.checkpoint.passing_errors import may_pass, pause

if TYPE_CHECKING:
    from hpc_det.checkpoint.committed import FileEntry

BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 20
"""Still in the core's cache when its checksum is made."""
_THREADS = 4
"""A checksum is made while another thread's block is on its way; Python holds neither of them up."""


class Block(NamedTuple):
    name: str
    offset: int
    size: int


Found = int | str
"""The checksum of a block, or what is wrong with its file."""


def blocks_of(files: Mapping[str, FileEntry]) -> list[Block]:
    """One, and empty, of an empty file: that it is there has to be seen, too."""
    return [
        Block(name, offset, min(BLOCK_BYTES, entry.size - offset))
        for name, entry in files.items()
        for offset in range(0, max(entry.size, 1), BLOCK_BYTES)
    ]


def read_blocks(folder: Path, files: Mapping[str, FileEntry], blocks: Iterable[Block]) -> list[Found]:
    """What was found in each of `blocks`, some of those of `files`. Where an error may pass, it is read once more."""
    every, read = list(blocks), partial(_read, folder, files)
    with ThreadPoolExecutor(_THREADS) as pool:
        found = dict(zip(every, pool.map(read, every), strict=True))
        again = [block for block, each in found.items() if isinstance(each, OSError) and may_pass(each)]
        if again:
            pause()
            found |= zip(again, pool.map(read, again), strict=True)
    return [str(each.strerror) if isinstance(each, OSError) else each for each in map(found.__getitem__, every)]


def open_regular(path: Path) -> BinaryIO:
    """For reading. Raises OSError for a link and for what is no regular file; it never waits for a FIFO's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{kind_of(mode)}, and no regular file", str(path))
    return open(descriptor, "rb")


def _read(folder: Path, files: Mapping[str, FileEntry], block: Block) -> Found | OSError:
    try:
        with open_regular(folder / block.name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != files[block.name].size:
                return f"{size} bytes, the manifest says {files[block.name].size}"
            return _checksum(file.fileno(), block)
    except OSError as error:
        return error


def _checksum(file: int, block: Block) -> int:
    crc, piece = 0, memoryview(bytearray(min(_PIECE_BYTES, block.size)))
    offset, end = block.offset, block.offset + block.size
    while offset < end:
        count = os.preadv(file, [piece[: end - offset]], offset)
        if not count:
            raise OSError(None, f"ends at {offset} bytes")
        crc = crc32(piece[:count], crc)
        offset += count
    return crc


def differences(files: Mapping[str, FileEntry], found: Iterable[tuple[Block, Found]]) -> dict[str, str]:
    """From the manifest, by the name of the file. Raises KeyError where a block of one has not been read."""
    known = {(block.name, block.offset): each for block, each in found}
    results = {name: [known[block.name, block.offset] for block in blocks_of({name: files[name]})] for name in files}
    return {name: problem for name in files if (problem := _difference(files[name], results[name]))}


def _difference(entry: FileEntry, found: list[Found]) -> str | None:
    crc = 0
    for offset, each in zip(range(0, max(entry.size, 1), BLOCK_BYTES), found, strict=True):
        if isinstance(each, str):
            return each
        crc = checksum_of_both(crc, each, min(BLOCK_BYTES, entry.size - offset))
    return None if crc == entry.crc32 else f"crc32 {crc:08x}, the manifest says {entry.crc32:08x}"


# --- crc32 is the remainder of a polynomial over GF(2), whose highest bit stands for x to the power of 0

_ONE = 1 << 31
_POLYNOMIAL = 0xEDB88320


def checksum_of_both(first: int, second: int, second_bytes: int) -> int:
    """The crc32 of bytes that have the crc32 `first` and, after them, `second_bytes` that have `second`.

    Appended bytes shift the first ones: multiply them by x to the power of their bits.
    """
    return _product(first, _shift(second_bytes)) ^ second


@lru_cache
def _shift(count: int) -> int:
    """x to the power of the bits of `count` bytes."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count >>= 1
    return power


def _product(one: int, other: int) -> int:
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = (one << 1) & 0xFFFFFFFF
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product
