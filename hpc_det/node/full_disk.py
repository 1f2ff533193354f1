"""Full disks: how to recognise the error, describe it in a message, and wait for space.

An exhausted quota counts as a full disk. The job process waits when one of the files that it writes finds no space
(`waited_for`), so that it does not end because of one line in its journal. Ranks fail, and start again when there is
space.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from hpc_det.errors import remedy_of
from hpc_det.node import disk

CODES = (errno.ENOSPC, errno.EDQUOT)
"""Values of errno that mean a full disk."""
PROBE_BYTES = 65536
"""Size of the file that `probe` writes."""

P = ParamSpec("P")
T = TypeVar("T")
Wait = Callable[[OSError], bool]
"""A function that is called after a write found no space. True: try again. False: give up and raise the error."""


def _never(error: OSError) -> bool:
    return False


_wait: Wait = _never
"""The function that decides in this process; outside of `waited_for` no write is retried."""


def cause_in(error: BaseException) -> OSError | None:
    """Return the full-disk error in the chain of `error`, the error itself included; None if there is none."""
    # Chains of exceptions can contain cycles.
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, OSError) and found.errno in CODES:
            return found
        seen.add(id(found))
        found = found.__cause__ or found.__context__
    return None


def sentence(error: OSError) -> str:
    """Return a message with the path, the space needed if that is known, the free space, and the remedy."""
    path = str(error.filename or "")
    needed, free = getattr(error, "needed_bytes", None), free_bytes(Path(path)) if path else None
    parts = {"needed": needed, "free": free}
    found = [f"{in_words(size)} {what}" for what, size in parts.items() if size is not None]
    message = ", ".join([f"{path}: {os.strerror(error.errno or 0)}", *found])
    return f"{message}; {remedy_of(error)}"


def free_bytes(path: Path) -> int | None:
    """Return the bytes free for this user on the file system of `path`; None if it does not report them."""
    with suppress(OSError):
        # The path itself may not exist yet.
        there = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
        return there.f_bavail * there.f_frsize
    return None


def in_words(size_bytes: int) -> str:
    """Return a size as text, such as "1.5 GB"."""
    for unit, one in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= one:
            return f"{size_bytes / one:.1f} {unit}"
    return f"{size_bytes} B"


@contextmanager
def needs(size_bytes: int) -> Iterator[None]:
    """Record `size_bytes` in a full-disk error that the block raises, for its message."""
    try:
        yield
    except Exception as error:
        if full := cause_in(error):
            full.needed_bytes = size_bytes  # type: ignore[attr-defined]  # for `sentence`
        raise


def probe(folder: Path) -> OSError | None:
    """Write and delete a small file in `folder`; return the error if the disk is full, else None."""
    path = disk.temporary_beside(folder / "probe")
    try:
        descriptor = disk.open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            disk.write_all(descriptor, bytes(PROBE_BYTES))
            disk.flush(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        error.filename = str(folder)  # not the probe, whose name says nothing to the user
        return cause_in(error)
    finally:
        with suppress(OSError):
            disk.unlink(path)
    return None


@contextmanager
def waited_for(wait: Wait) -> Iterator[None]:
    """Within the block, let writes of this process that find no space call `wait`."""
    global _wait
    before, _wait = _wait, wait
    try:
        yield
    finally:
        _wait = before


def tried_again(write: Callable[P, T]) -> Callable[P, T]:
    """Return `write` with retries after a full disk, as the `Wait` of this process decides.

    `write` must leave nothing behind when it fails.
    """

    @wraps(write)
    def patient(*args: P.args, **kwargs: P.kwargs) -> T:
        while True:
            try:
                return write(*args, **kwargs)
            except OSError as error:
                if error.errno not in CODES or not _wait(error):
                    raise

    return patient
