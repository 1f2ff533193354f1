"""Suspended jobs: all processes of a job stop and continue together, and time limits do not count the suspension.

Slurm and PBS suspend a job by sending SIGSTOP, which cannot be caught, to the processes that they know; PBS knows the
sessions that it has started. Launchers and ranks run in other sessions, so they would continue training beside the job
that has the nodes now. A guardian is a small process outside these sessions. It polls the state of the process that it
guards (proc(5)), and stops and continues this process's descendants with it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from hpc_det.node.process import descendants, ignore_stop_signals, is_running, is_stopped, spare, start_ticks

LOOK_S = 0.2
"""Seconds between two polls by the guardian."""
# The guardian runs with `python -IS`: without site-packages it starts in about 15 ms and uses little memory.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hpc_det.node.suspension import main; main(int(sys.argv[2]))"
)


class AwakeClock:
    """Counts the seconds since its creation, except those for which the process was suspended.

    A suspension shows as a long time between two calls, so `seconds` or `stopped_s` must be called regularly.
    """

    def __init__(self, every_s: float = 1.0) -> None:
        """`every_s`: the longest time between two calls while the process runs.

        After more than three times as long the process is taken to have been suspended, and only `every_s` of it
        counts.
        """
        self._every_s = every_s
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds for which the process ran."""
        self.stopped_s()
        return self._seconds

    def stopped_s(self) -> float:
        """Return the seconds for which the process was suspended since the last call; 0 if it ran."""
        now = time.monotonic()
        since, self._looked_at = now - self._looked_at, now
        stopped = since - self._every_s if since > 3 * self._every_s else 0.0
        self._seconds += since - stopped
        return stopped


@contextmanager
def guarded() -> Iterator[None]:
    """Within the block, stop and continue the descendants of this process together with it."""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", _PROGRAM, str(Path(__file__).parents[2]), str(os.getpid())],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a pipe of the job's would stay open as long as any process holds it
        stderr=subprocess.DEVNULL,
        # The scheduler's SIGSTOP reaches the sessions that it knows, and must not stop the guardian.
        start_new_session=True,
        preexec_fn=ignore_stop_signals,
    )
    # Functions that end all descendants must not end the guardian.
    spare(process.pid)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@cache
def guard_from_now_on() -> None:
    """Do as `guarded` does, until this process exits."""
    block, owner = ExitStack(), os.getpid()
    block.enter_context(guarded())
    # A forked child inherits atexit functions, but the guardian belongs to its parent.
    atexit.register(lambda: block.close() if os.getpid() == owner else None)


def main(guarded_pid: int) -> None:
    """Guard a process until it ends. Then continue the processes that were stopped with it, so that they notice and
    exit.
    """
    with suppress(ProcessLookupError):
        ticks = start_ticks(guarded_pid)
        stopped: dict[int, int] = {}
        while is_running(guarded_pid, ticks):
            if is_stopped(guarded_pid):
                _stop(guarded_pid, stopped)
            else:
                _continue(stopped)
                stopped = {}
            time.sleep(LOOK_S)
        _continue(stopped)


def _stop(guarded_pid: int, stopped: dict[int, int]) -> None:
    """Stop the descendants that are not stopped yet, and add the start ticks of each to `stopped`."""
    while new := set(descendants(guarded_pid)) - stopped.keys() - {os.getpid()}:
        for process in new:
            with suppress(ProcessLookupError, PermissionError):
                stopped[process] = 0
                # A process that a user has stopped before stays stopped later: 0 ticks match no process.
                if not is_stopped(process):
                    stopped[process] = start_ticks(process)
                    os.kill(process, signal.SIGSTOP)


def _continue(stopped: Mapping[int, int]) -> None:
    """Continue the processes that `_stop` has stopped."""
    for process, ticks in stopped.items():
        with suppress(ProcessLookupError, PermissionError):
            if is_running(process, ticks):
                os.kill(process, signal.SIGCONT)
