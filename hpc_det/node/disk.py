"""All calls that change a disk, for the store, the checkpoints and hpc_det.node itself.

With all calls in one module, tests can inject faults in one place: a full disk, a kill between two calls, a reply that
is lost on NFS. tests/node/test_disk.py checks that no other module of node/, store/ and checkpoint/ makes such a call.
Calls that only read, and changes of modes, stay in the other modules.

A file or folder that is renamed once it is complete has a temporary name that identifies its writer: the machine and
PID namespace, and the process id. If that process has exited, the file is abandoned and may be removed. Temporary files
of another machine, and those with a name of an older version, are removed once they are old.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hpc_det.node.process import process_namespace

ABANDONED_S = 3600.0
"""Seconds since the last write after which another machine's temporary file, or an older version's, is abandoned."""
_MARK = "hpc-det-"
_NAME = re.compile(rf"\.(?:.*\.)?{_MARK}(?P<place>.+)-(?P<process>\d+)-[0-9a-f]{{8}}")
_OLDER_NAME = re.compile(r"\.(?:.*\.)?[0-9a-f]{32}|\.code-kept-[a-z0-9_]{8}")
"""Temporary names that older versions used."""


def open_descriptor(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a file descriptor, as os.open does."""
    return os.open(path, flags, mode)


def write(descriptor: int, data: bytes | memoryview) -> int:
    """Write a part of `data` and return the number of bytes written."""
    return os.write(descriptor, data)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> int:
    """Write a part of `data` at `offset` and return the number of bytes written."""
    return os.pwrite(descriptor, data, offset)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Raises OSError if only a part of it could be written."""
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


def flush_file_system(folder: Path) -> bool:
    """Flush the whole file system of `folder`; return whether that succeeded, with the kernel's errors reported."""
    import ctypes

    # Older kernels do not report that a write has failed (syncfs(2), "BUGS").
    major, minor = re.findall(r"\d+", os.uname().release)[:2]
    if (int(major), int(minor)) < (5, 8):
        return False
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return bool(ctypes.CDLL(None).syncfs(descriptor) == 0)
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


def remove_empty(folder: Path) -> bool:
    """Remove the folder if it is empty, and return whether it was."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def make_empty(path: Path, mode: int) -> None:
    """Create an empty file if none exists."""
    path.touch(mode=mode)


def copy_content(source: IO[Any], target: Path) -> None:
    """Write everything left in `source` to the file `target`, which is created or overwritten."""
    try:
        with target.open("wb") as file:
            shutil.copyfileobj(source, file)
    except OSError as error:
        error.filename = error.filename or str(target)  # a write does not name its file
        raise


def temporary_beside(path: Path) -> Path:
    """Return an unused name in the folder of `path`, for a file that a rename or a link will turn into `path`."""
    return path.with_name(f".{path.name}.{_MARK}{process_namespace()}-{os.getpid()}-{os.urandom(4).hex()}")


def remove_abandoned(folders: Iterable[Path]) -> None:
    """Remove abandoned temporary files and folders directly inside each of `folders`; ignore errors."""
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in [entry for entry in entries if entry.name.startswith(".")]:
                with suppress(OSError):
                    if _is_abandoned(entry):
                        _remove(entry)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    found = _NAME.fullmatch(entry.name)
    if found and found["place"] == process_namespace():
        # The writer's process id is meaningful here only because machine, boot and PID namespace are the same.
        return not os.path.exists(f"/proc/{found['process']}")
    if not (found or _OLDER_NAME.fullmatch(entry.name)):
        return False
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        remove_tree(entry.path, ignore_errors=False)
    else:
        unlink(entry.path)
