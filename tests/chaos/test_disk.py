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

from tests.chaos.injection import Fault, FaultKind, Run, Zygote, zygote
from tests.chaos.replay import Change, Disk, Survives, changes
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.table import SAMPLED_IN_LONG, Amount, Tally

pytestmark = pytest.mark.integration

SAMPLE = 1
"""Number of changes per scenario and kind of trouble in a sample."""
ERRORS = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)


@pytest.fixture(scope="module")
def zygote_of_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with zygote(tmp_path_factory.mktemp("faults"), "tests.chaos.scenarios") as made:
        yield made


@dataclass
class ScenarioRunner:
    """Runs a scenario in new folders."""

    zygote: Zygote
    name: str
    tmp: Path
    count: int = 0
    before: int = 0
    """Number of values found in a new folder."""

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
        """Run without a fault; return the disk before the run, the result, and the changes on the disk."""
        folder, records = self.folder(), self.tmp / "records"
        disk = Disk(folder)
        run = self.run(folder, records=records)
        assert run.failed is None
        return disk, run, list(changes(records))


@pytest.fixture(params=SCENARIOS)
def runner(request: pytest.FixtureRequest, zygote_of_scenarios: Zygote, tmp_path: Path) -> ScenarioRunner:
    return ScenarioRunner(zygote_of_scenarios, request.param, tmp_path)


def check_found(scenario: Scenario, before: int, found: list[Any], promised: list[Any]) -> None:
    """Check that everything that the scenario reported exists, and at most one value more, which was not reported yet.

    `before`: number of values at the start.
    """
    if scenario.appends:
        assert [each for each in promised if each not in found] == []
        assert len(found) <= before + len(promised) + 1
    elif promised:
        assert found
        assert found[0] >= promised[-1]


def check_next_run(runner: ScenarioRunner, folder: Path) -> None:
    """Check that a second process, undisturbed, does its work without changing what exists."""
    before = runner.scenario.found(folder)
    again = runner.run(folder)
    assert again.failed is None
    now = runner.scenario.found(folder)
    if runner.scenario.appends:
        assert now[: len(before)] == before
        assert len(now) >= len(before) + len(again.said)
    else:
        assert now == said_in(again)[-1:]


def check_promises(runner: ScenarioRunner, folder: Path, promised: list[Any]) -> None:
    check_found(runner.scenario, runner.before, runner.scenario.found(folder), promised)
    check_next_run(runner, folder)
    shutil.rmtree(folder)


def said_in(run: Run) -> list[Any]:
    return [what for _, what in run.said]


@SAMPLED_IN_LONG
def test_what_was_written_before_a_kill_stays_and_the_next_process_goes_on(
    runner: ScenarioRunner, amount: Amount, tally: Tally
) -> None:
    _, run, made = runner.undisturbed()
    every: dict[FaultKind, Sequence[int]] = {
        FaultKind.KILL_BEFORE: range(1, run.made + 1),
        FaultKind.KILL_AFTER: range(1, run.made + 1),
        FaultKind.KILL_WITHIN: [change.number for change in made if change.kind == "write"],
    }
    for how, numbers in every.items():
        for number in amount.of(numbers, SAMPLE):
            folder = runner.folder()
            run = runner.run(folder, Fault(how, number))
            assert run.failed is None
            if run.killed:
                with tally.trying(f"{runner.scenario.what}: killed"):
                    check_promises(runner, folder, said_in(run))


@SAMPLED_IN_LONG
def test_what_was_promised_survives_a_power_cut_at_any_moment(
    runner: ScenarioRunner, amount: Amount, tally: Tally
) -> None:
    disk, run, made = runner.undisturbed()
    cuts = [*product(range(1, len(made) + 1), Survives)]
    tried = {*amount.of(cuts, 3 * SAMPLE)}
    for number, change in enumerate(made, 1):
        disk.apply(change)
        for kind in (kind for kind in Survives if (number, kind) in tried):
            left = runner.tmp / f"after-{number}"
            disk.write(left, kind)
            with tally.trying(f"{runner.scenario.what}: power cuts"):
                check_promises(runner, left, [what for recorded, what in run.said if recorded <= number])


@SAMPLED_IN_LONG
def test_an_error_of_the_disk_loses_nothing_that_was_promised(
    runner: ScenarioRunner, amount: Amount, tally: Tally
) -> None:
    _, run, made = runner.undisturbed()
    numbers = range(1, run.made + 1)
    kinds = [*product(ERRORS, (1, 10**6))]
    faults = [
        Fault(FaultKind.FAIL, number, *kinds[(number + more) % len(kinds)]) for number in numbers for more in (0, 3)
    ]
    unflushed = [Fault(FaultKind.FAIL, change.number, errno.EIO) for change in made if change.kind == "flush"]
    halves = [Fault(FaultKind.SHORT, change.number) for change in made if change.kind == "write"]
    for fault in [*amount.of(faults, SAMPLE), *amount.of(unflushed, SAMPLE), *amount.of(halves, SAMPLE)]:
        folder = runner.folder()
        run = runner.run(folder, fault)
        assert not run.killed
        with tally.trying(f"{runner.scenario.what}: errors of the disk"):
            assert run.failed or not run.failed_flushes, "what is not flushed is not promised"
            check_promises(runner, folder, said_in(run))
