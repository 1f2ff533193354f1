"""Files and folders of hpc_det: atomic replacement of whole files, read permissions, durable names.

Renaming without flushing the file and its folder is the classic crash bug (Pillai et al., OSDI '14, ALICE), so this
module flushes both. It takes no locks, because they are unreliable on NFS.

A file is readable by its owner alone or, below a shared folder, also by one group. Only the owner may write. A folder
is shared if and only if its mode has the bits of 2750: its group may read and list it. The setgid bit passes the group
on to everything created below, and distinguishes such a folder from one that a careless umask has left readable. Since
the group may not write, everything in an experiment's folder, links included, was created by the owner, and jobs may
follow what they find there.
"""

from __future__ import annotations

import grp
import math
import os
import pwd
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from hpc_det.node import disk, full_disk

PRIVATE_FILE, SHARED_FILE = 0o600, 0o640
PRIVATE_FOLDER, SHARED_FOLDER = 0o700, 0o2750
_MARK = stat.S_ISGID | stat.S_IRGRP | stat.S_IXGRP
"""The mode bits that make a folder a shared one."""
FLUSHES = 16
"""Number of files that are flushed at the same time."""
MANY_FILES = 1000
"""Number of files from which a folder is flushed with its whole file system, by one call."""
P = ParamSpec("P")
T = TypeVar("T")
flush_folder = disk.flush_folder


def _written_twice(write: Callable[P, T]) -> Callable[P, T]:
    """Return `write` with one retry after FileNotFoundError."""

    @wraps(write)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return write(*args, **kwargs)
        # This process may have been suspended for so long that another one took its temporary file for an abandoned one
        # (`disk.remove_abandoned`).
        except FileNotFoundError:
            return write(*args, **kwargs)

    return again


@full_disk.tried_again
@_written_twice
def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace `path` by a file with `content`; a reader finds the old content or the new one, never a part.

    The file has the read permissions of its folder, or is readable by its owner alone if `private`.
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
    """Create `path`, durable and readable by its owner alone, and return True; return False if it already exists.

    If several processes call this at once, one of them succeeds, also on NFS (open(2), O_EXCL).
    """
    partial = _written_beside(path, content, private=True)
    try:
        disk.link(partial, path)
    except FileExistsError:
        # NFS may lose the reply to link(2) and repeat the call, which then fails although the first one succeeded. The
        # link count shows that: the name that exists belongs to this very file.
        if os.stat(partial).st_nlink != 2:
            return False
    finally:
        disk.unlink(partial, missing_ok=True)
    flush_folder(path.parent)
    return True


def _written_beside(path: Path, content: str | bytes, private: bool) -> Path:
    """Write `content` to a temporary file in the folder of `path`, flush it, and return its path."""
    partial = disk.temporary_beside(path)
    try:
        write_flushed(partial, content, private=private)
    except OSError as error:
        error.filename = str(path)  # the temporary name means nothing to a user
        raise
    return partial


def write_flushed(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Create the file `path` with `content` and flush it; leave no file after an error. The caller flushes the
    folder.
    """
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
    """Delete the file and ignore errors, so that the caller can re-raise the error of its write."""
    with suppress(OSError):
        disk.unlink(partial)


def open_log(path: Path) -> int:
    """Return an appending descriptor of a log, which several processes may share."""
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def open_file(path: Path, flags: int) -> int:
    """Return a descriptor of `path` and give the file its folder's read permissions, whatever the umask.

    `flags` decide whether a missing file is created.
    """
    shared = is_shared(path.parent)
    descriptor = disk.open_descriptor(path, flags, SHARED_FILE if shared else PRIVATE_FILE)
    if shared:
        let_group_read(descriptor)
    return descriptor


def let_group_read(descriptor: int) -> None:
    """Set the mode of an open file to 0640."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != SHARED_FILE:
        os.fchmod(descriptor, SHARED_FILE)


def make_private(folder: Path) -> None:
    """Create `folder` and its missing parents with mode 0700, whatever the umask, and make their names durable."""
    for path in _missing(folder):
        disk.make_folder(path, PRIVATE_FOLDER, exist_ok=True)
        with suppress(PermissionError):  # a folder with write permission but no read permission cannot be flushed
            disk.flush_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create `folder` with the permissions of its parent, whatever the umask; several processes may do so at once."""
    mode = SHARED_FOLDER if is_shared(folder.parent) else PRIVATE_FOLDER
    try:
        disk.make_folder(folder, mode)
    except FileExistsError:
        return
    # Only if the mode differs: on a node where the user is not a member of the group, chmod(2) clears the setgid bit.
    if mode == SHARED_FOLDER and stat.S_IMODE(folder.stat().st_mode) != mode:
        folder.chmod(mode)


def make_folders(folder: Path) -> None:
    """Create `folder` and its missing parents as `make_folder` does."""
    for path in _missing(folder):
        make_folder(path)


def _missing(folder: Path) -> list[Path]:
    """Return those of `folder` and its parents that do not exist, from the top down."""
    return [path for path in reversed([folder, *folder.parents]) if not path.exists()]


def age_s(path: Path) -> float:
    """Return the seconds since `path` was last modified; infinity if it does not exist."""
    try:
        # The clock of a file server may be ahead of this node's.
        return max(time.time() - os.stat(path).st_mtime, 0.0)
    except FileNotFoundError:
        return math.inf


def is_shared(folder: Path) -> bool:
    """Return whether the mode of `folder` marks it as shared with a group."""
    return os.stat(folder).st_mode & _MARK == _MARK


def is_own(path: Path) -> bool:
    """Return whether `path` belongs to the user of this process; root does not own the files of others."""
    return os.stat(path).st_uid == os.geteuid()


def others_may_write(status: os.stat_result) -> bool:
    """Return whether the mode lets anyone but the owner write.

    A group whose only member is the user does not count: many systems give each user such a group, and umask 002.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not is_users_alone(status.st_gid)


def is_users_alone(group: int) -> bool:
    """Return whether a group, given by its number, has no member but the user of this process."""
    try:
        found, name = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == name and set(found.gr_mem) <= {name}


def share(folder: Path, group: int) -> None:
    """Let a group, given by its number, read everything that is created in `folder` from now on."""
    os.chown(folder, -1, group)
    folder.chmod(SHARED_FOLDER)


def share_alike(folder: Path, model: Path) -> None:
    """If the folder `model` is shared, share `folder` with the same group."""
    if is_shared(model) and not is_shared(folder):
        share(folder, os.stat(model).st_gid)


def set_mode(path: Path) -> None:
    """Give a file or folder that another program created with its own umask the permissions of its parent folder."""
    found, shared = os.lstat(path).st_mode, is_shared(path.parent)
    if stat.S_ISDIR(found):
        mode = SHARED_FOLDER if shared else PRIVATE_FOLDER
    else:
        mode = SHARED_FILE if shared else PRIVATE_FILE
    if stat.S_IMODE(found) != mode:
        path.chmod(mode)


def share_copy(path: Path) -> None:
    """Set the mode of a file that was copied with the mode of its source.

    In a shared folder the group may read and execute what the owner may, and others have no permissions.
    """
    if is_shared(path.parent):
        own = path.stat().st_mode & PRIVATE_FOLDER
        path.chmod(own | (own >> 3) & (stat.S_IRGRP | stat.S_IXGRP))


def take_umask_of(folder: Path) -> None:
    """Set this process's umask to match `folder`.

    Files that this process and its children create by other means, such as torch.save, then have the folder's
    permissions.
    """
    if is_shared(folder):
        os.umask(0o777 & ~SHARED_FOLDER)


@contextmanager
def replacement_of(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield a new private file beside `path` and its descriptor, to which writes are appended.

    At the end of the block the file is flushed and replaces `path`; after an error it is removed. The folder is made
    private, and what killed processes have left in it is removed.
    """
    make_private(path.parent)
    disk.remove_abandoned([path.parent])
    partial = disk.temporary_beside(path)
    descriptor = disk.open_descriptor(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, PRIVATE_FILE)
    try:
        yield partial, descriptor
        disk.flush(descriptor)
        disk.replace(partial, path)
    except BaseException:
        disk.unlink(partial, missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    disk.flush_folder(path.parent)


def flush_file(path: Path) -> None:
    """Flush the content of `path` to disk; do nothing if it does not exist."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        disk.flush(file.fileno())


def flush_tree(folder: Path) -> None:
    """Flush `folder` and all files and folders below it to disk."""
    files: list[str] = []
    folders: list[str] = []
    for path, _, names in os.walk(folder):
        folders.append(path)
        files += [os.path.join(path, name) for name in names]
    # For a few files, syncfs(2) could wait longer, because it also writes what other users have not flushed yet.
    if len(files) >= MANY_FILES and disk.flush_file_system(folder):
        return
    from concurrent.futures import ThreadPoolExecutor  # most processes that import this module never flush a folder

    with ThreadPoolExecutor(FLUSHES) as threads:  # a flush is mostly waiting
        list(threads.map(flush_file, map(Path, files)))
        list(threads.map(flush_folder, map(Path, folders)))
