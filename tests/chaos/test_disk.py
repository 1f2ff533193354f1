"""A process is killed at each of its changes on the disk, the disk fails there, or the power is cut."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpc_det.checkpoint.committed import newest_good
from hpc_det.store.files import read_json, read_lines
from hpc_det.store.journal import Journal
from tests.chaos.injection import Fault, How, Run, Zygote, zygote
from tests.chaos.replay import Disk, Survives, changes
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.table import Amount, Tally

SAMPLE = 4
"""Of the changes of each scenario, in `make test`."""


@pytest.fixture(scope="module")
def zygote_of_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote(tmp_path_factory.mktemp("faults"), "tests.chaos.scenarios") as made:
        yield made


@dataclass
class Place:
    """Where a scenario runs."""

    zygote: Zygote
    scenario: str
    tmp: Path
    count: int = 0

    def folder(self) -> Path:
        self.count += 1
        made = self.tmp / str(self.count)
        (made / "checkpoints").mkdir(parents=True, mode=0o700)
        return made

    def run(self, folder: Path, fault: Fault, records: Path | None = None) -> Run:
        return self.zygote.run(f"tests.chaos.scenarios:{self.scenario}", folder, fault, records)

    def changes(self) -> int:
        """On the disk, by one run that nothing disturbs."""
        return self.run(self.folder(), Fault()).made


@pytest.fixture(params=SCENARIOS)
def place(request: pytest.FixtureRequest, zygote_of_scenarios: Zygote, tmp_path: Path) -> Place:
    return Place(zygote_of_scenarios, request.param, tmp_path)


def found_in(scenario: str, folder: Path) -> list[Any]:
    """What a reader finds, oldest first. Nothing may be half there."""
    match scenario:
        case "saves" | "saves_behind":
            newest, skipped = newest_good(folder / "checkpoints")
            assert skipped == []
            return [newest.steps] if newest else []
        case "journal":
            return [[event["event"], event["attempt"]] for event in Journal(folder / "journal.jsonl").events()]
        case "lines":
            return [line["number"] for line in read_lines(folder / "metrics.jsonl")]
        case _:
            content = read_json(folder / "trial.json")
            return [content["number"]] if content else []


APPEND = ("journal", "lines")


def holds(scenario: str, found: list[Any], promised: list[Any]) -> None:
    """All that the scenario has said is there, and at most one thing more, which was not said yet."""
    if scenario in APPEND:
        assert found[: len(promised)] == promised
        assert len(found) <= len(promised) + 1
    elif promised:
        assert found
        assert found[0] >= promised[-1]


def goes_on(place: Place, folder: Path) -> None:
    """A second process, undisturbed, does its own work beside what is there."""
    before = found_in(place.scenario, folder)
    again = place.run(folder, Fault())
    assert again.failed is None
    said, now = [what for _, what in again.said], found_in(place.scenario, folder)
    assert now == ([*before, *said] if place.scenario in APPEND else said[-1:])


def survives(place: Place, folder: Path, promised: list[Any], *, then: bool = False) -> None:
    holds(place.scenario, found_in(place.scenario, folder), promised)
    if then:
        goes_on(place, folder)
    shutil.rmtree(folder)


def said_in(run: Run) -> list[Any]:
    return [what for _, what in run.said]


@pytest.mark.parametrize("how", [How.KILL_BEFORE, How.KILL_AFTER, How.KILL_WITHIN])
def test_what_was_written_before_a_kill_stays_and_the_next_process_goes_on(
    place: Place, amount: Amount, tally: Tally, how: How
) -> None:
    for number in amount.of(range(1, place.changes() + 1), SAMPLE):
        folder = place.folder()
        run = place.run(folder, Fault(how, number))
        assert run.failed is None
        assert run.killed or how is How.KILL_WITHIN  # what is no write has no half
        if run.killed:
            with tally.trying(f"{place.scenario}: {how.name.lower().replace('_', ' ')}"):
                survives(place, folder, said_in(run), then=True)


@pytest.mark.parametrize("survives_cut", Survives)
def test_what_was_promised_survives_a_power_cut_at_any_moment(
    place: Place, amount: Amount, tally: Tally, survives_cut: Survives
) -> None:
    folder, records = place.folder(), place.tmp / "records"
    disk = Disk(folder)
    run = place.run(folder, Fault(), records)
    assert run.failed is None
    made = list(changes(records))
    tried = amount.of(range(1, len(made) + 1), SAMPLE)
    for number, change in enumerate(made, 1):
        disk.apply(change)
        if number in tried:
            left = place.tmp / f"after-{number}"
            disk.write(left, survives_cut)
            with tally.trying(f"{place.scenario}: power cut, {survives_cut.value}"):
                survives(place, left, [what for recorded, what in run.said if recorded <= number])


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("times", [1, 1_000_000])
def test_an_error_of_the_disk_loses_nothing_that_was_promised(
    place: Place, amount: Amount, tally: Tally, error: int, times: int
) -> None:
    for number in amount.of(range(1, place.changes() + 1), SAMPLE):
        folder = place.folder()
        run = place.run(folder, Fault(How.FAIL, number, error, times))
        assert not run.killed
        with tally.trying(f"{place.scenario}: {errno.errorcode[error]} {'once' if times == 1 else 'from then on'}"):
            survives(place, folder, said_in(run), then=True)
