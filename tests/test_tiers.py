"""The guard of the unit tier works: these are unit tests, and every way to start a process fails in them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
from collections.abc import Callable

import pytest

from tests.facts import refused
from tests.tiers import StartedProcess

WAYS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run(["true"], check=False),
    "posix_spawn": lambda: os.posix_spawn("/bin/true", ["true"], os.environ),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_test_starts_no_process(way: str, request: pytest.FixtureRequest) -> None:
    with refused(StartedProcess, request.node.nodeid, "integration"):
        WAYS[way]()


@pytest.mark.integration
@pytest.mark.parametrize("way", ["subprocess", "system"])
def test_an_integration_test_may(way: str) -> None:
    WAYS[way]()
