"""File systems that are really full, or really read-only, beside the errors that test_disk.py makes up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.table import Amount, Tally
from tests.chaos.test_disk import Place, said_in, survives
from tests.chaos.test_disk import place as place
from tests.chaos.test_disk import zygote_of_scenarios as zygote_of_scenarios
from tests.small_disk import disk as disk
from tests.small_disk import fill


@pytest.fixture
def on_disk(place: Place, disk: Path, tmp_path: Path) -> Iterator[Place]:
    """A scenario that plays on a small file system."""
    place.tmp = disk
    yield place
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def test_a_file_system_that_is_full_loses_nothing_that_was_promised(
    on_disk: Place, disk: Path, amount: Amount, tally: Tally
) -> None:
    for left in amount.of([0, 1, 2, 3, 4, 6, 8, 12], 1):
        folder = on_disk.folder()
        first = on_disk.run(folder)
        assert first.failed is None
        ballast = fill(disk)
        with ballast.open("r+b") as file:
            file.truncate(max(ballast.stat().st_size - 4096 * left, 0))
        with tally.trying(f"{on_disk.scenario.what}: full and read-only file systems"):
            run = on_disk.run(folder)
            ballast.unlink()
            survives(on_disk, folder, [*said_in(first), *said_in(run)])


def test_a_file_system_that_is_read_only_loses_nothing_that_was_promised(
    on_disk: Place, disk: Path, amount: Amount, tally: Tally
) -> None:
    folder = on_disk.folder()
    first = on_disk.run(folder)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with tally.trying(f"{on_disk.scenario.what}: full and read-only file systems"):
        assert said_in(on_disk.run(folder)) == []
        found = on_disk.scenario.found(folder)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert on_disk.scenario.found(folder) == found
        survives(on_disk, folder, said_in(first))
