"""Suspended jobs: all processes of one stop and continue together, and time limits do not count that time.

Slurm and PBS suspend a job by SIGSTOP, which cannot be caught, to the processes that they know: PBS to the sessions
that it has started. Launchers and ranks run in sessions of their own and would train on beside the job that has the
nodes now. A guardian is a small process outside those sessions. It reads the state of the process that it guards
(proc(5)), and stops and continues the descendants of this process with it.
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
# Without site-packages it starts in about 15 ms and holds little memory.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from hpc_det.node.suspension import main; main(int(sys.argv[2]))"
)


class AwakeClock:
    """Counts the seconds since it was made. Look regularly: a stop shows as a long time between two looks."""

    def __init__(self, every_s: float = 1.0) -> None:
        """`every_s`: the longest time between two looks of a process that runs.

        Where it took more than three times as long, the process was stopped, and `every_s` counts as time it ran.
        """
        self._every_s = every_s
        self._seconds = 0.0
        self._looked_at = time.monotonic()

    def seconds(self) -> float:
        """For which the process ran."""
        self.stopped_s()
        return self._seconds

    def stopped_s(self) -> float:
        """Seconds for which the process was stopped since the last look; 0 where it ran."""
        now = time.monotonic()
        since, self._looked_at = now - self._looked_at, now
        stopped = since - self._every_s if since > 3 * self._every_s else 0.0
        self._seconds += since - stopped
        return stopped


@contextmanager
def guarded() -> Iterator[None]:
    """Within this block the descendants of this process stop and continue with it."""
    process = subprocess.Popen(
        [sys.executable, "-IS", "-c", _PROGRAM, str(Path(__file__).parents[2]), str(os.getpid())],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,  # a pipe of the job's would stay open as long as any process holds it
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=ignore_stop_signals,
    )
    spare(process.pid)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@cache
def guard_from_now_on() -> None:
    """As `guarded`, until this process exits."""
    block, owner = ExitStack(), os.getpid()
    block.enter_context(guarded())
    atexit.register(lambda: block.close() if os.getpid() == owner else None)


def main(guarded_pid: int) -> None:
    """Until the guarded process ends. What it leaves behind is continued, so that it notices the end and leaves too."""
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
    """Adds the start ticks of each process. Processes that were stopped before, by a user, stay as they are."""
    while new := set(descendants(guarded_pid)) - stopped.keys() - {os.getpid()}:
        for process in new:
            with suppress(ProcessLookupError, PermissionError):
                stopped[process] = 0
                if not is_stopped(process):
                    stopped[process] = start_ticks(process)
                    os.kill(process, signal.SIGSTOP)


def _continue(stopped: Mapping[int, int]) -> None:
    for process, ticks in stopped.items():
        with suppress(ProcessLookupError, PermissionError):
            if is_running(process, ticks):
                os.kill(process, signal.SIGCONT)
