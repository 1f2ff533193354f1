"""The tiers of tests: those without a mark below are unit tests, which start no process and fail where they try to."""

from __future__ import annotations

import multiprocessing.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

STARTERS = {"_fork_server", "warm", "any_pbs", "pbs_lab", "slurm_lab"}
"""Fixtures that start processes: what uses one is marked `integration`."""
ABOVE_UNIT = ("integration", "slurm", "gpu", "long", "chaos")
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn"}
"""Audit events (docs.python.org/3/library/audit_events.html) of calls that start a process."""


class StartedProcess(BaseException):
    """A unit test starts a process. No `except Exception` of the code under test hides it."""


_unit_test = ""


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if _unit_test and event in _STARTS:
        raise StartedProcess(f"{_unit_test} is a unit test and calls {event}: mark it `integration`")


sys.addaudithook(_refuse)
_spawn = multiprocessing.util.spawnv_passfds


def _spawn_unless_refused(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """multiprocessing starts its servers below the level that is audited."""
    _refuse("os.posix_spawn", ())
    return _spawn(path, args, passfds)


multiprocessing.util.spawnv_passfds = _spawn_unless_refused


@contextmanager
def held_to_its_tier(item: pytest.Item) -> Iterator[None]:
    """In the block, the fixtures of a unit test and the test itself start no process."""
    global _unit_test
    is_unit = not any(item.get_closest_marker(name) for name in ABOVE_UNIT)
    _unit_test = item.nodeid if is_unit else ""
    try:
        yield
    finally:
        _unit_test = ""
