"""The folders that an attempt has on a node, for its owner alone, and gone with it, or else with the next one there.

What agents that were KILLed have left on a node is removed by whoever begins there next. The owner of a folder holds a
lock on a file in it for as long as it lives; the kernel lets go of it, whatever ends the owner. In the file stands the
boot of the owner's kernel, since a folder may lie on a file system that other nodes see, too, and not every one of
these tells nodes of each other's locks.
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
"""A Unix socket's path has 108 bytes (unix(7)); a `$TMPDIR` may be longer."""
PREFIX, OWNER = "hpc-det-", ".owner"
_NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")
"""As tempfile makes them."""


class BadFolder(HpcDetError):
    """Full, or read-only, or worse: the node is to blame."""


class NodeFolders(NamedTuple):
    private: str
    """For the agent's socket, and what a container needs to know."""
    scratch: str | None
    """For the ranks, in the node's scratch folder; None without such."""


@contextmanager
def node_folders(plan: JobPlan) -> Iterator[NodeFolders]:
    """Raises UsageError where the node lacks the cluster's scratch folder, BadFolder where one takes nothing."""
    usual = tempfile.gettempdir()
    with _temporary(usual if len(usual) <= LONGEST_SOCKET_FOLDER else "/tmp") as private:
        if plan.scratch is None:
            yield NodeFolders(private, None)
            return
        with _temporary(_base(plan.scratch)) as scratch:
            yield NodeFolders(private, scratch)


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
    base = os.path.expandvars(scratch)
    if not os.path.isdir(base):
        raise UsageError(f"cluster.scratch: {scratch!r} is {base!r} on {socket.gethostname()}, and no folder there")
    return base


@contextmanager
def owned(folder: str) -> Iterator[None]:
    """While this process is in here, nobody takes the folder for a leftover."""
    with ExitStack() as held:
        with suppress(OSError):  # full, or a file system without locks: such a folder is nobody's to remove
            file = held.enter_context(open(os.path.join(folder, OWNER), "xb", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(_boot())  # last: without it the lock does not count
        yield


def remove_leftovers(base: str) -> None:
    """Those of this user in the folder `base`. No link is followed, and nothing that goes wrong is an error."""
    with suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(base)):
            with suppress(OSError):
                _remove_if_left(os.path.join(base, name))


def _remove_if_left(path: str) -> None:
    """Raises OSError where its owner lives, or nobody knows."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        owner = os.open(OWNER, os.O_RDWR | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
    with open(owner, "rb") as file:
        if file.read() == _boot():
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()
