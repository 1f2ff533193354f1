"""A process is killed at each of its changes on the disk, the disk fails there, or the power is cut."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.injection import Fault, How, Run, Zygote, zygote
from tests.chaos.replay import Change, Disk, Survives, changes
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.table import Amount, Tally

SAMPLE = 1
"""Of the changes of each scenario and kind of trouble, in `make test`."""
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


@pytest.fixture(scope="module")
def zygote_of_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote(tmp_path_factory.mktemp("faults"), "tests.chaos.scenarios") as made:
        yield made


@dataclass
class Place:
    """Where a scenario runs."""

    zygote: Zygote
    name: str
    tmp: Path
    count: int = 0
    before: int = 0
    """Found in a new folder."""

    @property
    def scenario(self) -> Scenario:
        return SCENARIOS[self.name]

    def folder(self) -> Path:
        self.count += 1
        made = self.tmp / str(self.count)
        (made / "checkpoints").mkdir(parents=True, mode=0o700)
        self.scenario.prepare(made)
        self.before = len(self.scenario.found(made))
        return made

    def run(self, folder: Path, fault: Fault | None = None, records: Path | None = None) -> Run:
        return self.zygote.run("tests.chaos.scenarios:play", folder, fault or Fault(), records, scenario=self.name)

    def undisturbed(self) -> tuple[Disk, Run, list[Change]]:
        """The disk before it, and what it changes there."""
        folder, records = self.folder(), self.tmp / "records"
        disk = Disk(folder)
        run = self.run(folder, records=records)
        assert run.failed is None
        return disk, run, list(changes(records))


@pytest.fixture(params=SCENARIOS)
def place(request: pytest.FixtureRequest, zygote_of_scenarios: Zygote, tmp_path: Path) -> Place:
    return Place(zygote_of_scenarios, request.param, tmp_path)


def holds(scenario: Scenario, before: int, found: list[Any], promised: list[Any]) -> None:
    """All that the scenario has said is there, and at most one thing more, which was not said yet.

    `before`: how much was there when it began.
    """
    if scenario.appends:
        assert [each for each in promised if each not in found] == []
        assert len(found) <= before + len(promised) + 1
    elif promised:
        assert found
        assert found[0] >= promised[-1]


def goes_on(place: Place, folder: Path) -> None:
    """A second process, undisturbed, does its own work beside what is there."""
    before = place.scenario.found(folder)
    again = place.run(folder)
    assert again.failed is None
    now = place.scenario.found(folder)
    if place.scenario.appends:
        assert now[: len(before)] == before
        assert len(now) >= len(before) + len(again.said)
    else:
        assert now == said_in(again)[-1:]


def survives(place: Place, folder: Path, promised: list[Any]) -> None:
    holds(place.scenario, place.before, place.scenario.found(folder), promised)
    goes_on(place, folder)
    shutil.rmtree(folder)


def said_in(run: Run) -> list[Any]:
    return [what for _, what in run.said]


def test_what_was_written_before_a_kill_stays_and_the_next_process_goes_on(
    place: Place, amount: Amount, tally: Tally
) -> None:
    _, run, made = place.undisturbed()
    every: dict[How, Sequence[int]] = {
        How.KILL_BEFORE: range(1, run.made + 1),
        How.KILL_AFTER: range(1, run.made + 1),
        How.KILL_WITHIN: [change.number for change in made if change.kind == "write"],
    }
    for how, numbers in every.items():
        for number in amount.of(numbers, SAMPLE):
            folder = place.folder()
            run = place.run(folder, Fault(how, number))
            assert run.failed is None
            if run.killed:
                with tally.trying(f"{place.scenario.what}: kills"):
                    survives(place, folder, said_in(run))


def test_what_was_promised_survives_a_power_cut_at_any_moment(place: Place, amount: Amount, tally: Tally) -> None:
    disk, run, made = place.undisturbed()
    cuts = [*product(range(1, len(made) + 1), Survives)]
    tried = {*amount.of(cuts, 3 * SAMPLE)}
    for number, change in enumerate(made, 1):
        disk.apply(change)
        for kind in (kind for kind in Survives if (number, kind) in tried):
            left = place.tmp / f"after-{number}"
            disk.write(left, kind)
            with tally.trying(f"{place.scenario.what}: power cuts"):
                survives(place, left, [what for recorded, what in run.said if recorded <= number])


def test_an_error_of_the_disk_loses_nothing_that_was_promised(place: Place, amount: Amount, tally: Tally) -> None:
    _, run, made = place.undisturbed()
    numbers = range(1, run.made + 1)
    kinds = [*product(ERRORS, (1, 10**6))]
    faults = [Fault(How.FAIL, number, *kinds[(number + more) % len(kinds)]) for number in numbers for more in (0, 3)]
    halves = [Fault(How.SHORT, change.number) for change in made if change.kind == "write"]
    for fault in [*amount.of(faults, 2 * SAMPLE), *amount.of(halves, SAMPLE)]:
        folder = place.folder()
        run = place.run(folder, fault)
        assert not run.killed
        with tally.trying(f"{place.scenario.what}: errors of the disk"):
            survives(place, folder, said_in(run))
