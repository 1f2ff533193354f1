"""All that changes a disk goes through this module: for the store and the checkpoints, and for node/ itself.

So there is one place to inject faults: a full disk, a kill between two calls, an answer that is lost on NFS.
tests/node/test_disk.py computes that no other module of node/, store/ and checkpoint/ makes such a call. What is only
read, and modes, are left to the modules themselves.

Files and folders that are renamed when they are whole have a temporary name that tells who writes: the machine with its
process namespace, and the process. Where that process is gone, nobody needs the file. What another machine has written,
and what has a name of an older version, is removed when it is old.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hpc_det.node.process import process_namespace

ABANDONED_S = 3600.0
"""A file that nobody has written to for so long has no writer any more, wherever that was."""
_MARK = "hpc-det-"
_NAME = re.compile(rf"\.(?:.*\.)?{_MARK}(?P<place>.+)-(?P<process>\d+)-[0-9a-f]{{8}}")
_OLDER_NAME = re.compile(r"\.(?:.*\.)?[0-9a-f]{32}|\.code-kept-[a-z0-9_]{8}")


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


def make_empty(path: Path, mode: int) -> None:
    """An empty file, where there is none yet."""
    path.touch(mode=mode)


def copy_content(source: IO[Any], target: Path) -> None:
    """Into a new file, or over an old one."""
    with target.open("wb") as file:
        shutil.copyfileobj(source, file)


def temporary_beside(path: Path) -> Path:
    """A name of this process alone in the folder of `path`, for what becomes `path` by a rename or a link."""
    return path.with_name(f".{path.name}.{_MARK}{process_namespace()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def remove_abandoned(folders: Iterable[Path]) -> None:
    """In each of `folders`, and not below it. What cannot be removed stays."""
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in [entry for entry in entries if entry.name.startswith(".")]:
                with suppress(OSError):
                    if _is_abandoned(entry):
                        _remove(entry)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    found = _NAME.fullmatch(entry.name)
    if found and found["place"] == process_namespace():
        return not os.path.exists(f"/proc/{found['process']}")
    if not (found or _OLDER_NAME.fullmatch(entry.name)):
        return False
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        remove_tree(entry.path, ignore_errors=False)
    else:
        unlink(entry.path)
