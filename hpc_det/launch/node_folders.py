"""The folders that an attempt has on a node, for its owner alone, and gone with it, or else with the next one there."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.leftovers import PREFIX, owned, remove_leftovers
from hpc_det.plan.job_plan import JobPlan

LONGEST_SOCKET_FOLDER = 80
"""A Unix socket's path has 108 bytes (unix(7)); a `$TMPDIR` may be longer."""


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
