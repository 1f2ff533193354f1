"""The documentation is true: the tests write every file of a page, run every command, and compare every output."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hpc_det.store.folders import ExperimentFolder, TrialFolder
from tests.docs.page import Change, Command, File, Page
from tests.facts import refused
from tests.labs.pbs_lab import PbsLab
from tests.labs.slurm import SlurmLab
from tests.wait import DEADLINE_S

CHECKOUT = Path(__file__).parents[2]
DOCS = CHECKOUT / "docs"
PAGES = [*sorted(CHECKOUT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
ELSEWHERE = {"setup", "slurm", "pbs", "world", "checkout", "submit"}
"""Marks of commands that are not executed on this machine alone. tests/docs/test_cli_page.py executes `world`,
tests/docs/test_gallery.py `submit`.
"""
MARKS = {*ELSEWHERE, "fails", "until", "long"}


def name_of(path: Path) -> str:
    return str(path.relative_to(DOCS if path.is_relative_to(DOCS) else CHECKOUT))


def marked(mark: str) -> list[Path]:
    """Return the pages that have a command with this mark."""
    return [path for path in PAGES if any(mark in step.marks for step in commands(path))]


def commands(path: Path) -> list[Command]:
    return [step for step in Page.read(path).steps() if isinstance(step, Command)]


def runs_here(command: Command) -> bool:
    return not command.marks & ELSEWHERE


FOR_CONTRIBUTORS = [
    CHECKOUT / "CONTRIBUTING.md",
    DOCS / "how-to" / "add-a-scheduler.md",
    DOCS / "explanation" / "architecture.md",
]
"""Pages about the code. They also name files that a contributor's change would add."""
MADE = (".venv/", "build/")
"""Folders that commands of these pages create."""
FOLLOWED = [path for path in PAGES if any(runs_here(command) for command in commands(path))]

every_page = pytest.mark.parametrize("path", PAGES, ids=name_of)
every_page_most_of_them_long = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name_of(path), marks=[] if path == CHECKOUT / "README.md" else pytest.mark.long)
        for path in FOLLOWED
    ],
)
pages_on_slurm = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name_of(path), marks=[] if path.name == "set-up-a-cluster.md" else pytest.mark.long)
        for path in marked("slurm")
    ],
)


class Reader:
    """Follows a page in a folder that contains the given folders and files of the checkout."""

    def __init__(self, folder: Path, *has: str, env: Mapping[str, str] = {}) -> None:
        self._folder = folder
        for name in has or ("conf", "docs/examples"):
            copy = shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            copy(CHECKOUT / name, folder / name)
        self._env = {**os.environ, **env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def follow(self, page: Page, wanted: Callable[[Command], bool]) -> None:
        for step in page.steps():
            if isinstance(step, File):
                self._write(step)
            elif isinstance(step, Change):
                changed = self._folder / step.path
                changed.write_text(step.applied(changed.read_text()))
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
        # On a busy machine, the driver of a TorchTrainer reports that it waits.
        return done.returncode, re.sub(r"(?m)^waiting for \d+ s: .*\n", "", done.stdout)


@pytest.mark.integration
@every_page_most_of_them_long
def test_a_page_does_what_it_says_on_this_machine(path: Path, tmp_path: Path) -> None:
    Reader(tmp_path).follow(Page.read(path), lambda command: runs_here(command) and "long" not in command.marks)


@pytest.mark.integration
@pytest.mark.parametrize("path", marked("checkout"), ids=name_of)
def test_a_page_does_what_it_says_in_a_copy_of_the_repository(path: Path, tmp_path: Path) -> None:
    parts = ("hpc_det", "conf", "slurm_templates", "docs", "tests", "pyproject.toml")
    own = {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": f"-p no:cacheprovider --basetemp={tmp_path}/pytest"}
    Reader(tmp_path, *parts, env=own).follow(Page.read(path), lambda command: "checkout" in command.marks)


@pytest.mark.long
@pytest.mark.parametrize("path", marked("long"), ids=name_of)
def test_a_page_does_all_that_it_says_on_this_machine(path: Path, tmp_path: Path) -> None:
    Reader(tmp_path).follow(Page.read(path), runs_here)


@pytest.mark.slurm
@pages_on_slurm
def test_a_page_does_what_it_says_on_a_slurm(path: Path, slurm_lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm_lab.use(monkeypatch)
    Reader(slurm_lab.folder()).follow(Page.read(path), lambda command: "slurm" in command.marks)


@pytest.mark.long
@pytest.mark.parametrize("path", marked("pbs"), ids=name_of)
def test_a_page_does_what_it_says_on_a_pbs(path: Path, pbs_lab: PbsLab, tmp_path: Path) -> None:
    pbs_lab.set_kill_delay("low", 30)  # the machine may be slow
    Reader(tmp_path).follow(Page.read(path), lambda command: "pbs" in command.marks)


@every_page
def test_every_command_of_a_page_stands_in_a_console_block(path: Path) -> None:
    page = Page.read(path)
    assert page.languages <= {"console", "diff", "json", "python", "yaml", "text"}
    assert all(step.marks <= MARKS for step in page.steps() if isinstance(step, Command))


@every_page
def test_commands_that_are_not_executed_only_set_up(path: Path) -> None:
    makefile = (CHECKOUT / "Makefile").read_text()
    for step in Page.read(path).steps():
        if isinstance(step, Command) and "setup" in step.marks:
            known = re.match(r"python3 -m venv |(?:\.venv/bin/)?pip install |export |make ([\w-]+)$", step.line)
            assert known, step.line
            assert known[1] is None or f"\n{known[1]}:" in makefile, step.line


@every_page
def test_what_a_page_links_to_is_there(path: Path) -> None:
    assert [link for link in Page.read(path).links() if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", [path for path in PAGES if path not in FOR_CONTRIBUTORS], ids=name_of)
def test_every_test_file_that_a_page_names_is_there(path: Path) -> None:
    named = set(re.findall(r"(?<![\w/])tests/[\w/]+\.py", path.read_text()))
    assert [name for name in sorted(named) if not (CHECKOUT / name).exists()] == []


def test_the_page_of_any_loop_shows_a_part_of_its_example() -> None:
    shown = re.search(r"(?ms)^```python\n(def main.*?)^```$", (DOCS / "how-to" / "any-training-loop.md").read_text())
    assert shown
    assert shown[1] in (DOCS / "examples" / "plain_loop" / "train.py").read_text()


class Named:
    """Finds the names in code spans of a page for contributors, outside of its fenced blocks."""

    def __init__(self, text: str) -> None:
        self._text = re.sub(r"(?ms)^```.*?^```$", "", text)
        self.paths = re.findall(r"`((?:\.?[\w-]+/)+[\w.-]*)`(?! \(new\))", self._text)
        """Files and folders; NAME is a placeholder."""
        self.targets = re.findall(r"`make\s+([\w-]+)", self._text)
        self.modules = re.findall(r"python -m ((?:tests|hpc_det)[\w.]*)", self._text)
        self.parts = re.findall(r"`(\w+)`\s+in\s+`([\w/]+\.py)`", self._text)
        """Python names, each with its file."""

    def missing(self) -> list[str]:
        """Return the names that do not exist in the checkout."""
        makefile = (CHECKOUT / "Makefile").read_text()
        paths = [path for path in self.paths if "NAME" not in path and not path.startswith(MADE)]
        modules = [CHECKOUT / name.replace(".", "/") for name in self.modules]
        return [
            *(path for path in paths if not (CHECKOUT / path).exists()),
            *(f"make {name}" for name in self.targets if f"\n{name}:" not in makefile),
            *(str(path) for path in modules if not path.with_suffix(".py").exists() and not path.is_dir()),
            *(f"{name} in {path}" for name, path in self.parts if not _defines(CHECKOUT / path, name)),
        ]


def _defines(path: Path, name: str) -> bool:
    return re.search(rf"(?m)^ *(?:(?:def|class) {name}\b|{name}\b.*[:=])", path.read_text()) is not None


@pytest.mark.parametrize("path", FOR_CONTRIBUTORS, ids=name_of)
def test_what_a_page_for_contributors_names_is_there(path: Path) -> None:
    named = Named(path.read_text())
    assert named.paths
    assert named.missing() == []


def test_a_name_of_nothing_is_found() -> None:
    text = """
`hpc_det/nowhere.py` and `hpc_det/search/new.py` (new), `hpc_det/launch/NAME.py`, `make tests`, `make test`,
`python -m tests.nowhere`, `python -m tests.benchmarks`, `nothing` in `tests/facts.py`, `refused` in
`tests/facts.py`

```text
hpc_det/fenced/nowhere.py
```
"""
    assert Named(text).missing() == [
        "hpc_det/nowhere.py",
        "make tests",
        str(CHECKOUT / "tests" / "nowhere"),
        "nothing in tests/facts.py",
    ]


def test_the_reference_explains_every_file_of_an_experiment() -> None:
    experiment = ExperimentFolder(Path("12"))
    trial = experiment.trial(1)
    own = _paths(experiment)
    of_the_trial = [path for path in _paths(trial) if path != trial.logs]
    of_an_attempt = [trial.rendezvous(1), trial.failures(1), trial.rank_log(1, 0)]
    text = (DOCS / "reference" / "files.md").read_text()
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
