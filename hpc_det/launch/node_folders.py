"""The private folders that an agent has on a node, emptied after each attempt and deleted at the agent's end.

Folders of agents that were killed are deleted by the next agent on that node. The owner of a folder holds a lock on a
file in it as long as it lives; the kernel releases the lock however the owner ends. The file contains the boot id of
the owner's kernel, because the folder may be on a file system that other nodes share, and not every shared file system
enforces locks between nodes.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.plan.job_plan import JobPlan

LONGEST_SOCKET_FOLDER = 80
"""Most characters of a folder for the agent's socket, whose whole path is limited to 108 bytes (unix(7))."""
PREFIX, OWNER = "hpc-det-", ".owner"
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""Names as tempfile creates them."""


class BadFolder(HpcDetError):
    """A folder of the node is full, read-only or otherwise unusable: a fault of the node."""


class NodeFolders(NamedTuple):
    """The paths of an agent's folders on its node."""

    private: str
    """For the agent's socket, and files that a container needs."""
    scratch: str | None
    """For temporary files of the ranks, in the cluster's scratch folder; None if the cluster has none."""


@contextmanager
def node_folders(plan: JobPlan) -> Iterator[NodeFolders]:
    """Create the node's folders and delete them at the end of the block.

    Raises UsageError if the cluster's scratch folder does not exist on this node, BadFolder if a folder cannot be
    created.
    """
    usual = tempfile.gettempdir()
    # The path of the agent's socket must fit into 108 bytes, and `$TMPDIR` may be long.
    with _temporary(usual if len(usual) <= LONGEST_SOCKET_FOLDER else "/tmp") as private:
        if plan.scratch is None:
            yield NodeFolders(private, None)
            return
        with _temporary(_base(plan.scratch)) as scratch:
            yield NodeFolders(private, scratch)


def empty(folders: NodeFolders) -> None:
    """Delete what is in the folders, for the next attempt. Ignores errors."""
    for folder in filter(None, folders):
        with suppress(OSError):
            for name in set(os.listdir(folder)) - {OWNER}:
                path = os.path.join(folder, name)
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        os.unlink(path)


@contextmanager
def _temporary(base: str) -> Iterator[str]:
    remove_leftovers(base)
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=base)
    except OSError as error:
        raise BadFolder(f"{base}: {error.strerror}") from None
    with owned(folder.name), folder:
        yield folder.name


def _base(scratch: str) -> str:
    """Return the cluster's scratch folder on this node, with variables expanded. Raises UsageError if it is missing."""
    base = os.path.expandvars(scratch)
    if not os.path.isdir(base):
        raise UsageError(
            f"cluster.scratch: {scratch!r} is {base!r} on {socket.gethostname()}, which is not a folder there"
        )
    return base


@contextmanager
def owned(folder: str) -> Iterator[None]:
    """Within the block, mark `folder` as owned by this process, so that no other process deletes it as a leftover."""
    with ExitStack() as held:
        with suppress(OSError):  # a full disk, or no locks: without its mark the folder is never deleted as a leftover
            file = held.enter_context(open(os.path.join(folder, OWNER), "xb", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_boot())  # after the lock: a file without the boot id marks no leftover
        yield


def remove_leftovers(base: str) -> None:
    """Delete this user's leftover folders in `base`. Follows no links and ignores errors."""
    with suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(base)):
            with suppress(OSError):
                _remove_if_left(os.path.join(base, name))


def _remove_if_left(path: str) -> None:
    """Delete the folder `path` if its owner has ended. Raises OSError if it still runs, or if that is unknown."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        owner = os.open(OWNER, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
    with open(owner, "rb") as file:
        # Only the kernel that granted the lock, in the same boot, can be trusted to enforce it.
        if file.read() == _boot():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()
