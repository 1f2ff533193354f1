"""Writing past the page cache (O_DIRECT, open(2)): no second copy takes up memory, nor has to be made before the disk
begins to write, and what others read from the cache stays there.

It takes whole pages, from memory that begins with one. File systems that know no such thing, and what is no whole page,
get plain writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from hpc_det.node import disk


def past_the_cache(descriptor: int) -> None:
    """Where the file system lets it; some refuse it here, others at the first write, with EINVAL."""
    with suppress(OSError):
        _set_flags(descriptor, _flags(descriptor) | os.O_DIRECT)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`. Raises OSError."""
    while data:
        try:
            written = disk.write_at(descriptor, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_past_the_cache(descriptor):
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
