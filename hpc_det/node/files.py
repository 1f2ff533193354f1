"""Files and folders of ours: whole files by atomic rename, who may read them, and their names made durable.

Rename without a flush of the file and of its folder is the classic crash bug (Pillai et al., OSDI '14, ALICE), so both
are flushed here. Nothing takes a lock: NFS breaks them.

A file is for its owner alone or, below a shared folder, for one group, too. Nobody else ever writes. A folder is shared
by its mode, 2750, and by nothing else: its group reads and lists; the setgid bit hands the group on to all that is made
below, and tells it from a folder that a careless umask has left open. Since no group may write, nothing is in an
experiment, no link either, that its owner has not made, and its jobs may follow what they find.
"""

from __future__ import annotations

import grp
import math
import os
import pwd
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from hpc_det.node import disk, full_disk

PRIVATE_FILE, SHARED_FILE = 0o600, 0o640
PRIVATE_FOLDER, SHARED_FOLDER = 0o700, 0o2750
_MARK = stat.S_ISGID | stat.S_IRGRP | stat.S_IXGRP
FLUSHES = 16
"""At the same time."""
P = ParamSpec("P")
T = TypeVar("T")
flush_folder = disk.flush_folder


def _written_twice(write: Callable[P, T]) -> Callable[P, T]:
    """For a process that was suspended for so long that another one has removed its half-written file
    (`disk.remove_abandoned`).
    """

    @wraps(write)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return write(*args, **kwargs)
        except FileNotFoundError:
            return write(*args, **kwargs)

    return again


@full_disk.tried_again
@_written_twice
def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace `path` by a file with `content`: a reader sees the old one or the new, never a part.

    It can be read by whom its folder is for, or by its owner alone.
    """
    partial = _written_beside(path, content, private)
    try:
        disk.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise
    flush_folder(path.parent)


@full_disk.tried_again
@_written_twice
def write_first(path: Path, content: str | bytes) -> bool:
    """Make `path`, whole, on disk and for its owner alone; False where it is there already.

    Of many processes one succeeds, on NFS too (open(2), O_EXCL).
    """
    partial = _written_beside(path, content, private=True)
    try:
        disk.link(partial, path)
    except FileExistsError:
        # An answer of NFS may be lost and the call repeated: then the name that exists is this very file's.
        if os.stat(partial).st_nlink != 2:
            return False
    finally:
        disk.unlink(partial, missing_ok=True)
    flush_folder(path.parent)
    return True


def _written_beside(path: Path, content: str | bytes, private: bool) -> Path:
    """A file with `content`, on disk, under a name of its own in the folder of `path`."""
    partial = disk.temporary_beside(path)
    try:
        write_flushed(partial, content, private=private)
    except OSError as error:
        error.filename = str(path)  # the one that a reader knows
        raise
    return partial


def write_flushed(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Make the file `path`, whole and on disk, or none; its name is durable when its folder is flushed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = disk.open_descriptor(path, flags, PRIVATE_FILE) if private else open_file(path, flags)
    try:
        disk.write_all(descriptor, content.encode() if isinstance(content, str) else content)
        disk.flush(descriptor)
    except BaseException as error:
        _remove(path)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _remove(partial: Path) -> None:
    """After an error, which another one shall not hide."""
    with suppress(OSError):
        disk.unlink(partial)


def open_log(path: Path) -> int:
    """The descriptor of a file that processes print to, one after the other or together."""
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_file(path: Path, flags: int) -> int:
    """The descriptor of a file for whom its folder is, whatever the umask; made where `flags` say so."""
    shared = is_shared(path.parent)
    descriptor = disk.open_descriptor(path, flags, SHARED_FILE if shared else PRIVATE_FILE)
    if shared:
        let_group_read(descriptor)
    return descriptor


def let_group_read(descriptor: int) -> None:
    """An open file, of which everybody else keeps out."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != SHARED_FILE:
        os.fchmod(descriptor, SHARED_FILE)


def make_private(folder: Path) -> None:
    """`folder` and what is missing above it, each for its owner alone, whatever the umask; their names are durable."""
    for path in _missing(folder):
        disk.make_folder(path, PRIVATE_FOLDER, exist_ok=True)
        with suppress(PermissionError):  # one may make folders where one may not read
            disk.flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """For whom the folder above is, whatever the umask. Any number of processes may do it."""
    mode = SHARED_FOLDER if is_shared(folder.parent) else PRIVATE_FOLDER
    try:
        disk.make_folder(folder, mode)
    except FileExistsError:
        return
    # Not without need: on a node that knows less of the user's groups, chmod(2) would take the setgid bit away.
    if mode == SHARED_FOLDER and stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)


def make_folders(folder: Path) -> None:
    """The same, with what is missing above it."""
    for path in _missing(folder):
        make_folder(path)


def _missing(folder: Path) -> list[Path]:
    """`folder` and those above it that are not there, the highest first."""
    return [path for path in reversed([folder, *folder.parents]) if not path.exists()]


def age_s(path: Path) -> float:
    """Seconds since `path` was changed last, 0 where a file server's clock is ahead; infinity where there is no such
    file.
    """
    try:
        return max(time.time() - os.stat(path).st_mtime, 0.0)
    except FileNotFoundError:
        return math.inf


def is_shared(folder: Path) -> bool:
    return os.stat(folder).st_mode & _MARK == _MARK


def is_own(path: Path) -> bool:
    """Whether it belongs to the user of this process. Root is no owner of what others have made."""
    return os.stat(path).st_uid == os.geteuid()


def others_may_write(status: os.stat_result) -> bool:
    """Whether anybody but its owner may, as its mode says. A group of the user alone, as many systems give each user
    together with an umask of 002, is nobody else.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_users_alone(status.st_gid)


def _is_users_alone(group: int) -> bool:
    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def share(folder: Path, group: int) -> None:
    """Let a group, by its number, read what is made in `folder` from now on."""
    os.chown(folder, -1, group)
    folder.chmod(SHARED_FOLDER)


def share_alike(folder: Path, model: Path) -> None:
    """Let the group of the folder `model` read `folder`, too, where it may read the model."""
    if is_shared(model) and not is_shared(folder):
        share(folder, os.stat(model).st_gid)


def set_mode(path: Path) -> None:
    """A file or folder that others have made with the mode of their umask is for whom the folder above is."""
    found, shared = os.lstat(path).st_mode, is_shared(path.parent)
    if stat.S_ISDIR(found):
        mode = SHARED_FOLDER if shared else PRIVATE_FOLDER
    else:
        mode = SHARED_FILE if shared else PRIVATE_FILE
    if stat.S_IMODE(found) != mode:
        path.chmod(mode)


def share_copy(path: Path) -> None:
    """A file that was copied with the mode of its source: in a shared folder the group reads and runs what its owner
    does, and nobody else.
    """
    if is_shared(path.parent):
        own = path.stat().st_mode & PRIVATE_FOLDER
        path.chmod(own | (own >> 3) & (stat.S_IRGRP | stat.S_IXGRP))


def take_umask_of(folder: Path) -> None:
    """What this process and its children make by other means, such as torch.save, is for whom `folder` is, too."""
    if is_shared(folder):
        os.umask(0o777 & ~SHARED_FOLDER)


def flush_file(path: Path) -> None:
    """Make what was written to `path` durable; nothing where there is no such file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        disk.flush(file.fileno())


def flush_tree(folder: Path) -> None:
    """Make `folder` and all files and folders below it durable, several at a time: a flush is mostly waiting."""
    folders: list[Path] = [folder]
    files: list[Path] = []
    for path in folder.rglob("*"):
        (folders if path.is_dir() else files).append(path)
    with ThreadPoolExecutor(FLUSHES) as threads:
        list(threads.map(flush_file, files))
        list(threads.map(flush_folder, folders))
