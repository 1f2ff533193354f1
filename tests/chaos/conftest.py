"""Each test that asks for `amount` is two: a sample in `make test`, and everything in `make chaos`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.chaos.table import PROPERTY, Amount, Tally, shown


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.chaos)], ids=["sample", "all"])
def amount(request: pytest.FixtureRequest) -> Amount:
    return Amount(is_all=request.param)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    made = Tally()
    yield made
    request.node.user_properties.append((PROPERTY, asdict(made)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One process runs the tests of the machine's one lab and those that flood networks, one after the other: a flood
    would hold up the lab's daemons. It begins with them, as they take longest.
    """
    for item in filter(_runs_apart, items):
        item.add_marker(pytest.mark.xdist_group("slurm and floods"))
    if config.option.markexpr == "chaos":
        items.sort(key=lambda item: not _runs_apart(item))


def _runs_apart(item: pytest.Item) -> bool:
    return item.get_closest_marker("slurm") is not None or item.path.name == "test_network.py"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.option.markexpr != "chaos":
        return
    tallies = []
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if getattr(report, "when", None) == "teardown":
            tallies += [Tally(**value) for name, value in report.user_properties if name == PROPERTY]
    terminalreporter.section("chaos")
    terminalreporter.write_line("\n".join(shown(tallies)))
