"""Errors of reading that may pass: of a file server that is busy or came back, of a process with too many open files.

Such an error says nothing about what a checkpoint holds, so reading is tried once more, after a pause.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

PAUSE_S = 3.0
_OF_CONTENT = (
    None,  # of hpc_det, about the content
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENAMETOOLONG),
    *(errno.EACCES, errno.EPERM),
)

T = TypeVar("T")


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
