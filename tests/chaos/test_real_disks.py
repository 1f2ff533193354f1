"""Tests on file systems that are really full or read-only, in addition to the errors that test_disk.py injects."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.chaos.injection import Zygote
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.table import SAMPLED_IN_LONG, Amount, Tally
from tests.chaos.test_disk import ScenarioRunner, check_promises, said_in
from tests.chaos.test_disk import zygote_of_scenarios as zygote_of_scenarios
from tests.small_disk import disk as disk
from tests.small_disk import fill

pytestmark = pytest.mark.integration

PAGES_LEFT = (0, 1, 2, 3, 4, 6, 8, 12)
WHAT = "full and read-only file systems"


@pytest.fixture
def writable_again(disk: Path) -> Iterator[None]:
    yield
    remount(disk, "rw")


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


@SAMPLED_IN_LONG
def test_a_file_system_that_is_full_loses_nothing_that_was_promised(
    zygote_of_scenarios: Zygote, disk: Path, amount: Amount, tally: Tally
) -> None:
    for name, left in amount.of([*product(SCENARIOS, PAGES_LEFT)], 2):
        runner = ScenarioRunner(zygote_of_scenarios, name, disk)
        folder = runner.folder()
        first = runner.run(folder)
        assert first.failed is None
        ballast = fill(disk)
        with ballast.open("r+b") as file:
            file.truncate(max(ballast.stat().st_size - 4096 * left, 0))
        with tally.trying(WHAT):
            run = runner.run(folder)
            ballast.unlink()
            check_promises(runner, folder, [*said_in(first), *said_in(run)])


@SAMPLED_IN_LONG
def test_a_file_system_that_is_read_only_loses_nothing_that_was_promised(
    zygote_of_scenarios: Zygote, disk: Path, writable_again: None, amount: Amount, tally: Tally
) -> None:
    for name in amount.of([*SCENARIOS], 2):
        runner = ScenarioRunner(zygote_of_scenarios, name, disk)
        folder = runner.folder()
        first = runner.run(folder)
        remount(disk, "ro")
        with tally.trying(WHAT):
            assert said_in(runner.run(folder)) == []
            found = runner.scenario.found(folder)
            remount(disk, "rw")
            assert runner.scenario.found(folder) == found
            check_promises(runner, folder, said_in(first))
