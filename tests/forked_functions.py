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


def has_imported(modules: list[str]) -> int:
    """Return how many of these modules this process has imported, as the exit code."""
    return len(sys.modules.keys() & {*modules})


def write_and_wait(path: str) -> int:
    """Write the process id to a file, and wait until this process is killed."""
    Path(f"{path}.part").write_text(str(os.getpid()))
    os.replace(f"{path}.part", path)
    while True:
        time.sleep(60)
