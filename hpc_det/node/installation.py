"""The installed files of hpc_det, which `pip install --upgrade` or `git pull` may replace while processes run.

A process that then imports another module mixes two versions. So a job imports what it needs while its ranks start, and
starts itself again between two attempts if its files were replaced.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

from hpc_det.node.process import STOP_SIGNALS

SETTLED_S = 5.0
"""Seconds without a change after which an upgrade is taken for complete."""
_LONGEST_S, _POLL_S = 120.0, 0.2
"""Longest wait for that, and the time between two looks."""
_State = tuple[int, int, int] | None
"""Inode, size, and time of the last change [ns] of a file; None if it does not exist."""


class Replaced(Exception):
    """The installed files of hpc_det were replaced while this process was running."""


class Installation:
    """The files of the modules of hpc_det that this process has imported."""

    def __init__(self) -> None:
        modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == "hpc_det"]
        self._states = {file: _state(file) for module in modules if (file := getattr(module, "__file__", None))}

    def is_replaced(self) -> bool:
        """Return whether one of the files was changed or removed since this object was made."""
        return any(_state(file) != state for file, state in self._states.items())


def start_again() -> NoReturn:
    """Replace this process by a new one with the same command, when the upgrade is complete.

    The new process handles the stop signals that arrive until then; it has to unblock them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    _await_upgrade()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _await_upgrade() -> None:
    """Wait until the files have not changed for SETTLED_S."""
    end, installation, since = time.monotonic() + _LONGEST_S, Installation(), time.monotonic()
    while (now := time.monotonic()) < min(end, since + SETTLED_S):
        time.sleep(_POLL_S)
        if installation.is_replaced():
            installation, since = Installation(), now


def _state(file: str) -> _State:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
