"""Each test with the fixture `amount` runs twice: as a sample in `make test`, and completely in `make chaos`.

With the mark `SAMPLED_IN_LONG`, the sample runs in `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.chaos.table import FEWEST_KILLS, PROPERTY, Amount, Tally, kills, shown

FOLDER = "tests/chaos"
GROUP = "slurm and floods"


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.chaos)], ids=["sample", "all"])
def amount(request: pytest.FixtureRequest) -> Amount:
    return Amount(is_all=request.param)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    made = Tally()
    yield made
    request.node.user_properties.append((PROPERTY, asdict(made)))


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let one process run the tests of the machine's one lab and those that flood networks, one after the other: a
    flood would delay the lab's daemons. They run first, as they take longest.
    """
    for item in filter(_runs_apart, items):
        item.add_marker(pytest.mark.xdist_group(GROUP))
    if config.option.markexpr == "chaos":
        items.sort(key=lambda item: not _runs_apart(item))


def _runs_apart(item: pytest.Item) -> bool:
    return item.get_closest_marker("slurm") is not None or item.path.name == "test_network.py"


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a complete run with too few kills, which may happen when tests are skipped."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and is_everything(session.config) and too_few(collected(terminal)):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.option.markexpr != "chaos":
        return
    tallies = collected(terminalreporter)
    ids = [report.nodeid.removesuffix(f"@{GROUP}") for report in terminalreporter.stats.get("skipped", [])]
    terminalreporter.section("chaos")
    terminalreporter.write_line("\n".join(shown(tallies, [each.removeprefix(f"{FOLDER}/") for each in ids])))
    if is_everything(terminalreporter.config) and too_few(tallies):
        terminalreporter.write_line(f"failed: fewer than {FEWEST_KILLS} kills were tried", red=True)


def is_everything(config: pytest.Config) -> bool:
    """Return whether `make chaos` runs completely."""
    folders = [config.invocation_params.dir / argument for argument in config.args]
    is_part = config.option.keyword or config.option.collectonly
    return config.option.markexpr == "chaos" and not is_part and Path(__file__).parent in folders


def too_few(tallies: Sequence[Tally]) -> bool:
    return kills(tallies) < FEWEST_KILLS


def collected(terminal: pytest.TerminalReporter) -> list[Tally]:
    reports = (report for reports in terminal.stats.values() for report in reports)
    ended = (report for report in reports if getattr(report, "when", None) == "teardown")
    return [Tally(**value) for report in ended for name, value in report.user_properties if name == PROPERTY]
