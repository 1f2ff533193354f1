"""Functions that a fork server calls in the tests."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

FUNCTIONS = "tests.forked_functions"
"""The name of this module for a fork server."""


def write_and_exit(argument: tuple[str, int]) -> int:
    """Write the id of the parent to a file, and return the code: `argument` is [PATH, CODE]."""
    path, code = argument
    Path(path).write_text(json.dumps({"parent": os.getppid(), "pid": os.getpid()}))
    return code


def write_what_it_is(argument: tuple[str, str, int]) -> int:
    """Write what this process is to a file: `argument` is [PATH, MODULE, DESCRIPTOR]."""
    path, module, descriptor = argument
    found = {
        "has module": module in sys.modules,
        "threads": len(os.listdir("/proc/self/task")),
        "command": Path("/proc/self/cmdline").read_text().split("\0"),
        "variable": os.environ.get("OF_THE_TEST"),
        "session": os.getsid(0) == os.getpid(),
        "parent": os.getppid(),
        "inherited": os.pread(descriptor, 100, 0).decode(),
        "sockets": sum(os.readlink(f"/proc/self/fd/{name}").startswith("socket:") for name in _descriptors()),
    }
    Path(path).write_text(json.dumps(found))
    return 5


def _descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def has_imported(modules: list[str]) -> int:
    """Return how many of these modules this process has imported, as the exit code."""
    return len(sys.modules.keys() & {*modules})


def write_and_wait(path: str) -> int:
    """Write the process id to a file, and wait until this process is killed."""
    Path(f"{path}.part").write_text(str(os.getpid()))
    os.replace(f"{path}.part", path)
    while True:
        time.sleep(60)
