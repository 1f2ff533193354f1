"""What this node has of a file in memory already."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_MISSING = 0.001
"""Pages that may have been put out since, and are read one by one at a fault each."""


def is_in_memory(path: Path) -> bool:
    """Whether the page cache has a file: then to map it takes no memory more, and waits for no disk.

    Where the file system has a cache of its own or none, as GPFS and BeeGFS, it has not even what was just read, nor
    where memory is short. Source: mincore(2). Raises OSError where the file cannot be opened.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        if not size:
            return False
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:  # ctypes takes what can be written
            first = ctypes.c_char.from_buffer(pages)
            there = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(size), there)
            del first  # else the map cannot be closed
        return not failed and bytes(there).count(0) <= _MISSING * len(there)
