"""gloo's ports are closed as soon as the ranks of a group are connected.

gloo listens as long as its group exists, though nobody of the group connects any more. It keeps every connection that
strangers make, and ends its process where it can accept no more: as many as a process may have open files, 1024 on many
clusters, end a training at any moment (gloo/transport/tcp/listener.cc: "accept: Too many open files").
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LAZY = "TORCH_GLOO_LAZY_INIT"
"""With this variable, ranks connect at their first exchange."""
_FILES = Path("/proc/self/fd")


@contextmanager
def closed_once_connected() -> Iterator[None]:
    """The ports that gloo opens within the block, in which a process group is made, are closed at its end."""
    before = _listening()
    yield
    if LAZY not in os.environ:
        for descriptor in _listening() - before:
            with suppress(OSError):  # without a place for a Unix socket it stays open
                _replace(descriptor)


def _listening() -> set[int]:
    """Descriptors of the TCP sockets that listen."""
    return {number for number in map(int, os.listdir(_FILES)) if _listens(number)}


def _listens(descriptor: int) -> bool:
    try:
        borrowed = socket.socket(fileno=descriptor)
    except OSError:  # no socket, or closed meanwhile
        return False
    try:
        is_tcp = borrowed.family in (socket.AF_INET, socket.AF_INET6) and borrowed.type == socket.SOCK_STREAM
        return is_tcp and bool(borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    finally:
        borrowed.detach()


def _replace(descriptor: int) -> None:
    """By a socket that nobody can reach, and that may be accepted from and closed as the one before: gloo ends the
    process where either fails.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as nobody:
        at = os.open(folder, os.O_RDONLY)
        try:
            nobody.bind(f"{_FILES}/{at}/socket")  # the folder's own path may be too long for a socket
        finally:
            os.close(at)
        nobody.listen()
        nobody.setblocking(False)
        os.dup2(nobody.fileno(), descriptor, inheritable=False)
