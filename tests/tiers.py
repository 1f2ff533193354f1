"""The tiers of tests. A test without one of the marks below is a unit test: it starts no process, and fails if it tries
to.
"""

from __future__ import annotations

import multiprocessing.util
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

STARTERS = {"_fork_server", "warm", "any_pbs", "pbs_lab", "slurm_lab"}
"""Fixtures that start processes: tests that use one are marked `integration`."""
ABOVE_UNIT = ("integration", "slurm", "gpu", "long", "chaos")
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"}
"""Audit events (docs.python.org/3/library/audit_events.html) of calls that start a process."""


class StartedProcess(BaseException):
    """Raised when a unit test starts a process. No `except Exception` of the code under test hides it."""


_unit_test = ""
_threads_before: set[threading.Thread] = set()
"""The threads that earlier tests in this process have left, other than the one that runs the tests. A daemon thread of
an integration test may still query a scheduler while a unit test runs, which is not the fault of that test.
"""


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    thread = threading.current_thread()
    if _unit_test and event in _STARTS and thread not in _threads_before:
        raise StartedProcess(f"{_unit_test} is a unit test and calls {event} in {thread.name}: mark it `integration`")


sys.addaudithook(_refuse)
_spawn = multiprocessing.util.spawnv_passfds


def _spawn_unless_refused(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Refuse, too, when multiprocessing starts its servers, which it does below the level that is audited."""
    _refuse("os.posix_spawn", ())
    return _spawn(path, args, passfds)


multiprocessing.util.spawnv_passfds = _spawn_unless_refused


@contextmanager
def held_to_its_tier(item: pytest.Item) -> Iterator[None]:
    """In the block, a unit test and its fixtures cannot start a process."""
    global _unit_test, _threads_before
    _threads_before = {*threading.enumerate()} - {threading.current_thread()}
    is_unit = not any(item.get_closest_marker(name) for name in ABOVE_UNIT)
    _unit_test = item.nodeid if is_unit else ""
    try:
        yield
    finally:
        _unit_test = ""
