"""All that the store and the checkpoints change on a disk goes through this module, and through nothing else.

So there is one place to inject faults: a full disk, a kill between two calls, an answer that is lost on NFS.
tests/node/test_disk.py computes that no other module of store/ and checkpoint/ makes such a call. What is only read,
and modes, are left to the modules themselves.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO, Any


def open_descriptor(path: Path, flags: int, mode: int = 0o600) -> int:
    return os.open(path, flags, mode)


def write(descriptor: int, data: bytes | memoryview) -> int:
    """How many bytes were written."""
    return os.write(descriptor, data)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """How many bytes were written."""
    return os.pwrite(descriptor, data, offset)


def write_all(descriptor: int, data: bytes) -> None:
    """Raises OSError where not all of it could be written."""
    rest = memoryview(data)
    while rest:
        rest = rest[write(descriptor, rest) :]


def truncate(descriptor: int, size: int) -> None:
    os.ftruncate(descriptor, size)


def flush(descriptor: int) -> None:
    os.fsync(descriptor)


def flush_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    os.link(source, target)


def symlink(path: Path, to: Path) -> None:
    path.symlink_to(to)


def unlink(path: Path | str, *, missing_ok: bool = False) -> None:
    Path(path).unlink(missing_ok=missing_ok)


def make_folder(path: Path, mode: int, *, parents: bool = False, exist_ok: bool = False) -> None:
    path.mkdir(mode=mode, parents=parents, exist_ok=exist_ok)


def remove_tree(folder: Path | str, *, ignore_errors: bool = True) -> None:
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def copy_content(source: IO[Any], target: Path) -> None:
    """Into a new file, or over an old one."""
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)
