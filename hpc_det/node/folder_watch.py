"""Writes to files in folders, as Linux reports them (inotify(7)): only those of processes on this machine, also on a
file system that other machines share.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_IN_MODIFY, _IN_Q_OVERFLOW = 0x2, 0x4000
_EVENT = struct.Struct("iIII")
"""struct inotify_event without the name: watch, mask, cookie, bytes of the name."""
_QUEUE_BYTES, _PARSED_BYTES = 1 << 20, 1 << 16
"""Bytes of a full queue of events, and the most that are parsed: 2,000 events, which takes 1 ms."""


class FolderWatch:
    """Collects the files that were written in some folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Raises OSError if the kernel cannot watch the folders: one is missing, or the user has too many watches."""
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = _checked(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        """Is readable after a write, until the next call of `written`."""
        self._folders: dict[int, Path] = {}
        try:
            for folder in folders:
                watch = _checked(libc.inotify_add_watch(self.fd, os.fsencode(folder), _IN_MODIFY))
                self._folders[watch] = folder
        except OSError:
            self.close()
            raise

    def written(self) -> set[Path] | None:
        """Return the files written since the last call; None if there were too many writes to know which."""
        try:
            events = os.read(self.fd, _QUEUE_BYTES)
        except BlockingIOError:
            return set()
        if len(events) > _PARSED_BYTES:
            return None
        found, at = set[Path](), 0
        while at < len(events):
            watch, mask, _, size = _EVENT.unpack_from(events, at)
            if mask & _IN_Q_OVERFLOW:
                return None
            at += _EVENT.size + size
            if mask & _IN_MODIFY:
                found.add(self._folders[watch] / os.fsdecode(events[at - size : at].rstrip(b"\0")))
        return found

    def close(self) -> None:
        os.close(self.fd)


def _checked(result: int) -> int:
    """Return the result of a system call. Raises OSError if it has failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"inotify: {os.strerror(number)}")
    return result
