"""The documentation does what it says: every file of a page is written, every command run, every output compared."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from hpc_det.config.cluster import Cluster, Containers, Pool
from hpc_det.config.section import Section
from hpc_det.store.folders import ExperimentFolder, TrialFolder
from tests.docs.page import Command, File, Page
from tests.facts import refused
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S

CHECKOUT = Path(__file__).parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]
IN_A_WORLD = {"cli.md", "experiments.md", "profiling.md"}
"""Pages whose commands tests/docs/test_cli_page.py executes, where there are experiments already."""
FOLLOWED = [path for path in PAGES if path.name not in IN_A_WORLD]
ELSEWHERE = {"setup", "slurm", "pbs"}
MARKS = {*ELSEWHERE, "fails", "until", "long"}


def takes_long(path: Path) -> bool:
    return any("long" in step.marks for step in Page.read(path).steps() if isinstance(step, Command))


every_page = pytest.mark.parametrize("path", PAGES, ids=[path.name for path in PAGES])
every_page_most_of_them_long = pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name, marks=[] if path.name == "README.md" else pytest.mark.long) for path in FOLLOWED],
)


class Reader:
    """Somebody who does what a page says, in a folder that looks like a checkout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.copytree(CHECKOUT / "conf", folder / "conf")
        shutil.copytree(CHECKOUT / "docs" / "examples", folder / "docs" / "examples")
        self._env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def follow(self, page: Page, wanted: Callable[[Command], bool]) -> None:
        for step in page.steps():
            if isinstance(step, File):
                self._write(step)
            elif wanted(step):
                self._execute(step)

    def _write(self, file: File) -> None:
        path = self._folder / os.path.expandvars(file.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)

    def _execute(self, command: Command) -> None:
        end = time.monotonic() + DEADLINE_S
        code, output = self._run(command)
        while "until" in command.marks and not command.agrees(output) and time.monotonic() < end:
            time.sleep(0.2)
            code, output = self._run(command)
        assert command.agrees(output), f"$ {command.line}\n--- the page shows\n{command.shown}\n--- it says\n{output}"
        assert bool(code) == ("fails" in command.marks), f"$ {command.line}\nends with {code}\n{output}"

    def _run(self, command: Command) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", command.line],
            cwd=self._folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
        )
        return done.returncode, done.stdout


@pytest.mark.integration
@every_page_most_of_them_long
def test_a_page_does_what_it_says_on_this_machine(path: Path, tmp_path: Path) -> None:
    Reader(tmp_path).follow(Page.read(path), lambda command: not command.marks & {*ELSEWHERE, "long"})


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in FOLLOWED if takes_long(path)], ids=lambda path: path.name)
def test_a_page_does_all_that_it_says_on_this_machine(path: Path, tmp_path: Path) -> None:
    Reader(tmp_path).follow(Page.read(path), lambda command: not command.marks & ELSEWHERE)


@pytest.mark.long
@pytest.mark.slurm
def test_the_quickstart_does_what_it_says_on_a_slurm(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_lab.use(monkeypatch)
    page = Page.read(CHECKOUT / "docs" / "quickstart.md")
    Reader(slurm_lab.folder()).follow(page, lambda command: "slurm" in command.marks)


@pytest.mark.slurm
def test_a_real_slurm_is_detected_as_the_page_shows(slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_lab.use(monkeypatch)
    page = Page.read(CHECKOUT / "docs" / "clusters.md")
    Reader(slurm_lab.folder()).follow(page, lambda command: "slurm" in command.marks)


@pytest.mark.long
@pytest.mark.parametrize("name", ["submitit", "reliability"])
def test_a_page_does_what_it_says_on_a_pbs(name: str, pbs_lab: PbsLab, tmp_path: Path) -> None:
    pbs_lab.set_kill_delay("low", 30)  # the machine may be slow
    page = Page.read(CHECKOUT / "docs" / f"{name}.md")
    Reader(tmp_path).follow(page, lambda command: "pbs" in command.marks)


@pytest.mark.parametrize("section", [Cluster, Pool, Containers])
def test_the_table_of_a_profiles_keys_is_the_schema(section: type[Section]) -> None:
    rows = {f"| `{name}` | {_default(field)} | {field.description} |" for name, field in section.model_fields.items()}
    shown = set((CHECKOUT / "docs" / "clusters.md").read_text().splitlines())
    assert rows - shown == set()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "see below" if isinstance(field.default, Section) else f"`{json.dumps(field.default)}`"


@every_page
def test_every_command_of_a_page_stands_in_a_console_block(path: Path) -> None:
    page = Page.read(path)
    assert page.languages <= {"console", "json", "python", "yaml", "text"}
    assert all(step.marks <= MARKS for step in page.steps() if isinstance(step, Command))


@every_page
def test_commands_that_are_not_executed_only_set_up(path: Path) -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    for step in Page.read(path).steps():
        if isinstance(step, Command) and "setup" in step.marks:
            known = re.match(r"python3 -m venv |(?:\.venv/bin/)?pip install |export |make (\w+)$", step.line)
            assert known, step.line
            assert known[1] is None or f"\n{known[1]}:" in makefile, step.line


@every_page
def test_what_a_page_links_to_is_there(path: Path) -> None:
    assert [link for link in Page.read(path).links() if not (path.parent / link).exists()] == []


@every_page
def test_every_test_file_that_a_page_names_is_there(path: Path) -> None:
    named = set(re.findall(r"tests/[\w/]+\.py", path.read_text()))
    assert [name for name in sorted(named) if not (CHECKOUT / name).exists()] == []


def test_every_module_that_the_architecture_names_is_there() -> None:
    named = re.findall(
        r"(?:hpc_det|tests|conf|slurm_templates)/[\w./]*", (CHECKOUT / "docs" / "architecture.md").read_text()
    )
    assert named
    assert [name for name in named if not (CHECKOUT / name.rstrip(".")).exists()] == []


def test_the_architecture_explains_every_file_of_an_experiment() -> None:
    experiment = ExperimentFolder(Path("12"))
    trial = experiment.trial(1)
    own = _paths(experiment)
    of_the_trial = [path for path in _paths(trial) if path != trial.logs]
    of_an_attempt = [trial.rendezvous(1), trial.failures(1), trial.rank_log(1, 0)]
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    explained = {Path(name) for name in re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE)}
    assert {path.relative_to("12") for path in [*own, *of_the_trial, *of_an_attempt]} <= explained


def _paths(folder: ExperimentFolder | TrialFolder) -> list[Path]:
    values = [getattr(folder, name) for name, kind in vars(type(folder)).items() if isinstance(kind, property)]
    return [value for value in values if isinstance(value, Path)]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("shown", "output"),
    [("Created experiment 1\n", "Created experiment 2"), ("", "a warning"), ("a\n...\nc\n", r"a\nb")],
)
def test_a_page_that_lies_is_caught(shown: str, output: str, tmp_path: Path) -> None:
    lying = Page(text=f"```console\n$ printf '{output}\\n'\n{shown}```\n")
    with refused(AssertionError, "the page shows", *output.split("\\n")):
        Reader(tmp_path).follow(lying, lambda command: True)


@pytest.mark.integration
def test_a_page_that_leaves_out_what_differs_tells_the_truth(tmp_path: Path) -> None:
    page = Page(text="```console\n$ printf 'a\\nb 17\\nc\\n'\na\nb ...\n...\nc\n```\n")
    Reader(tmp_path).follow(page, lambda command: True)


@pytest.mark.integration
def test_a_command_that_fails_unannounced_is_caught(tmp_path: Path) -> None:
    with refused(AssertionError, "false", 1):
        Reader(tmp_path).follow(Page(text="```console\n$ false\n```\n"), lambda command: True)


def test_a_link_to_nowhere_is_found() -> None:
    assert Page(text="see [this](docs/nowhere.md#top), [that](https://example.org)").links() == ["docs/nowhere.md"]
