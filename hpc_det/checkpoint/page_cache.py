"""What this node has of a file in memory already."""

from __future__ import annotations

import ctypes
import mmap
import os
from io import FileIO
from pathlib import Path

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
