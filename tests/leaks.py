"""Find what a test leaves behind: processes, threads, changed environment variables, a changed umask."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from tests import processes
from tests.machine import slowness

MARK = "HPC_DET_TEST_ID"
"""Variable that is set during one test and inherited by all processes that it starts, so that a re-parented process is
found, too.
"""

ENVIRONMENT_OF_OTHERS = {
    MARK,
    "PYTEST_CURRENT_TEST",  # set by pytest
    "KMP_DUPLICATE_LIB_OK",  # set by the first import of scikit-learn
    "KMP_INIT_AT_FORK",
}
LASTS_AS_LONG_AS_PYTHON = "multiprocessing.resource_tracker"
WAITS_FOR_THE_NEXT = "qsub "
"""A real PBS' qsub stays for a minute, in case more jobs are submitted."""

LOOK_S = 0.02


class LeakCheck:
    """Create it before a test; after the test, `leaks` reports what the test left behind and removes what it can."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._umask = _umask()
        self._threads = set(threading.enumerate())
        self._children = {*multiprocessing.active_children()}
        self._test_id = str(uuid.uuid4())
        self._pids = {*processes.pids()}
        os.environ[MARK] = self._test_id

    def leaks(self, ends_s: float) -> list[str]:
        """Return one line for each leak. Processes and threads have `ends_s` seconds to end, more on a slow machine."""
        problems = [f"changed environment variable {name}" for name in self._restore_environ()]
        if (umask := _umask()) != self._umask:
            problems.append(f"umask {umask:03o}, not {self._umask:03o} as before")
            os.umask(self._umask)
        if self._is_something_left():
            self._await_ends(ends_s * slowness())
        left = self._new_processes()
        problems += [f"process {pid} still runs: {command}" for pid, command in left.items()]
        _end(left)
        problems += [f"child not joined: {child}" for child in {*multiprocessing.active_children()} - self._children]
        return problems + [f"thread still runs: {thread.name}" for thread in self._new_threads()]

    def _is_something_left(self) -> bool:
        return bool(self._new_processes() or self._new_threads())

    def _await_ends(self, ends_s: float) -> None:
        """Wait for a number of checks, not for a time: while the whole machine stalls, nothing can end."""
        for _ in range(int(ends_s / LOOK_S)):
            if not self._is_something_left():
                break
            time.sleep(LOOK_S)

    def _restore_environ(self) -> list[str]:
        os.environ.pop(MARK, None)
        if MARK in self._environ:  # a test may run tests
            os.environ[MARK] = self._environ[MARK]
        names = (self._environ.keys() | os.environ.keys()) - ENVIRONMENT_OF_OTHERS
        changed = sorted(name for name in names if self._environ.get(name) != os.environ.get(name))
        for name in changed:
            if name in self._environ:
                os.environ[name] = self._environ[name]
            else:
                del os.environ[name]
        return changed

    def _new_threads(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if not thread.daemon and thread not in self._threads]

    def _new_processes(self) -> dict[int, str]:
        """Return the command line by PID of our descendants and of all processes that carry the mark."""
        new = {*processes.pids()} - self._pids
        commands = {pid: " ".join(processes.words(pid, "cmdline")).strip() for pid in new}
        return {
            pid: command
            for pid, command in commands.items()
            if not _is_known(command) and processes.runs(pid) and (self._is_marked(pid) or _descends(pid))
        }

    def _is_marked(self, pid: int) -> bool:
        return f"{MARK}={self._test_id}" in processes.words(pid, "environ")


def _end(pids: Collection[int]) -> None:
    """Kill the processes, and close their Popen objects in this process, which would otherwise warn in the test in
    which they become garbage.
    """
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for found in gc.get_objects() if pids else ():
        if type(found) is subprocess.Popen and found.pid in pids:
            with suppress(BrokenPipeError), found:
                pass


def _is_known(command: str) -> bool:
    return LASTS_AS_LONG_AS_PYTHON in command or command.startswith(WAITS_FOR_THE_NEXT)


def _descends(pid: int) -> bool:
    return os.getpid() in processes.ancestors(pid)


def _umask() -> int:
    """Read the umask from proc(5), which does not change it."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("Umask:")), 8)
