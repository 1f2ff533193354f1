"""The guard of the unit tier works: these are unit tests, and every way to start a process fails in them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tests.facts import refused
from tests.tiers import StartedProcess, held_to_its_tier

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


def test_no_thread_of_a_unit_test_starts_a_process(request: pytest.FixtureRequest) -> None:
    with ThreadPoolExecutor(1) as threads, refused(StartedProcess, request.node.nodeid, "integration"):
        threads.submit(WAYS["subprocess"]).result()


@pytest.mark.integration
def test_a_unit_test_may_run_while_a_thread_of_an_earlier_test_starts_a_process() -> None:
    unit_test: Any = SimpleNamespace(nodeid="test_unit", get_closest_marker=lambda name: None)
    may_start = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(lambda: may_start.wait() and WAYS["subprocess"]())
        with held_to_its_tier(unit_test):
            may_start.set()
            assert started.exception() is None


@pytest.mark.integration
@pytest.mark.parametrize("way", ["subprocess", "system"])
def test_an_integration_test_may(way: str) -> None:
    WAYS[way]()
