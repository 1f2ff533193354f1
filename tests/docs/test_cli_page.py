"""docs/reference/cli.md agrees with the help of the commands, and every example in it works."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hpc_det.cli.main import main
from hpc_det.submit import bundle
from tests.docs.cli_page import Entry, entries, examples, shown
from tests.docs.test_pages import commands, marked, name_of
from tests.docs.world import environment, make, point_to_a_sweep, populate, queue_on_paper
from tests.small_environment import Environment

ON_A_TERMINAL = ("hpc-det top", "hpc-det tensorboard")
"""Commands that run until they are stopped: tests/cli/top and tests/cli/test_tensorboard.py execute them."""
TRAINING = ("hpc-det experiment verify-resume",)
"""Commands that need real trainings: docs/how-to/check-exact-resume.md has examples, which are executed."""
EXAMPLES = [(e, line) for e in entries() if e.name not in (*ON_A_TERMINAL, *TRAINING) for line in examples(e)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder; a copy of its initial state is beside it."""
    folder = tmp_path_factory.mktemp("cli") / "world"
    with pytest.MonkeyPatch.context() as patch:
        make(folder)
        _enter(folder, environment(folder), patch)
        umask = os.umask(0o077)
        try:
            populate(folder)
        finally:
            os.umask(umask)
    shutil.copytree(folder, folder.with_name("before"), symlinks=True)
    return folder


@pytest.fixture
def fresh(world: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Restore the initial state of the world."""
    umask = os.umask(0o077)  # the command line sets its own umask
    shutil.rmtree(world)
    shutil.copytree(world.with_name("before"), world, symlinks=True)
    _enter(world, environment(world), monkeypatch)
    yield world
    os.umask(umask)


def _enter(folder: Path, env: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    for name, value in env.items():
        patch.setenv(name, value)
    patch.chdir(folder / "work")


@pytest.mark.parametrize("entry", list(entries()), ids=lambda entry: entry.name)
def test_every_command_has_an_example_of_its_own(entry: Entry) -> None:
    assert any(line.startswith(entry.name) for line in examples(entry))


@pytest.mark.integration
@pytest.mark.parametrize(("entry", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_works(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], entry: Entry, line: str
) -> None:
    if " sweep " in line:
        point_to_a_sweep(fresh / "work" / "multirun" / "2026-11-20" / "10-30-00")
    if " job " in line or "set priority" in line:
        queue_on_paper(fresh / "hpc_det", monkeypatch)
    if " environment " in line:
        # Not hundreds of MB of packages.
        monkeypatch.setattr(bundle, "site_folders", list)
        Environment.make(fresh / "venv", monkeypatch)
    program, *arguments = shlex.split(line)
    code = main(arguments)
    captured = capfd.readouterr()
    assert program == "hpc-det"
    assert code == 0 or (code == 1 and "doctor" in arguments), captured.err  # this machine may lack something
    if "--json" in arguments:
        names = re.findall(r'"(\w+)":', shown(entry))
        assert names
        assert [name for name in names if f'"{name}":' not in captured.out] == []


@pytest.mark.integration
def test_an_example_that_fails_is_told(fresh: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["experiment", "describe", "16"]) == 2
    assert "experiment 16: not found" in capfd.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("path", marked("world"), ids=name_of)
def test_a_page_does_what_it_says_in_this_world(fresh: Path, capfd: pytest.CaptureFixture[str], path: Path) -> None:
    for command in commands(path):
        if "world" not in command.marks:
            continue
        _, *arguments = shlex.split(command.line)
        main(arguments)
        captured = capfd.readouterr()
        assert command.agrees(captured.out + captured.err), (
            f"$ {command.line}\n--- the page shows\n{command.shown}\n--- it says\n{captured}"
        )
