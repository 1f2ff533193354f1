"""The installed hpc_det is replaced while a job runs."""

from __future__ import annotations

import ast
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.gang import Gang
from tests.launch.job.replaced import AWAITS_IMPORTS, MARKED, PACKAGE, REPLACES, install
from tests.wait import DEADLINE_S, wait_for

pytestmark = pytest.mark.integration

EARLY = ("hpc_det.launch.agent", "hpc_det.notify.change", "hpc_det.search.")
"""Modules that a job imports before its first ranks start, or in the processes of its agents."""


@pytest.fixture
def installed(gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the hpc_det that the job uses, and a newer one that lists the modules which are run."""
    folder = tmp_path / "installed"
    gang.env |= {"PYTHONPATH": str(folder), "INSTALLED": str(folder), "IMPORTERS": "1"}
    monkeypatch.chdir(tmp_path)  # `python -m` imports from the working directory first
    install(folder)
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_whose_installation_is_replaced_makes_its_next_attempt_with_the_new_one(
    gang: Gang, installed: Path, workers: int
) -> None:
    gang.env["IMPORTERS"] = str(workers)  # with two workers: the job and the one that trains
    gang.plan(REPLACES, max_restarts=1)
    job = gang.start_job(workers)
    assert job.wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    assert gang.ends() == [("failed", "restart"), ("finished", "done")]
    assert {*(installed / "used").read_text().split()} == {*MARKED}


def test_a_stop_signal_that_arrives_during_the_upgrade_reaches_the_new_version(gang: Gang, installed: Path) -> None:
    gang.plan(REPLACES, max_restarts=1)
    job = gang.start_job()
    wait_for(lambda: "hpc_det was replaced" in gang.printed.read_text() and blocks(job.pid, signal.SIGTERM))
    job.send_signal(signal.SIGTERM)
    job.wait(timeout=DEADLINE_S)
    assert [cause for cause, _ in gang.ends()] == ["failed", "cancelled"]
    assert (installed / "used").exists()


def blocks(pid: int, number: int) -> bool:
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    return bool(int(mask.split()[1], 16) & 1 << number - 1)


def test_the_job_of_a_replaced_installation_ends_a_running_attempt_without_new_modules(
    gang: Gang, installed: Path
) -> None:
    shutil.rmtree(installed / "newer")
    # The new version has no module of the old one.
    gang.plan(f'{AWAITS_IMPORTS}; mv "$INSTALLED/hpc_det" "$INSTALLED/former"; mkdir "$INSTALLED/hpc_det"')
    job = gang.start_job()
    assert job.wait(timeout=DEADLINE_S) == 0, gang.printed.read_text()
    assert gang.ends() == [("finished", "done")]
    assert gang.search().finished


def test_a_job_imports_all_that_it_needs_while_its_ranks_start() -> None:
    program = (
        "import json, sys, hpc_det.launch.job.__main__, hpc_det.launch.job.late_imports\n"
        "print(json.dumps({name: module.__file__ for name, module in sys.modules.items() if 'hpc_det' in name}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    files = {name: path for name, path in json.loads(done.stdout).items() if path}
    late = {name for path in files.values() for name in imports_in_functions(Path(path).read_text())}
    assert "hpc_det.checkpoint.storage" in late
    assert [name for name in sorted(late - files.keys()) if not name.startswith(EARLY)] == []


def imports_in_functions(code: str) -> set[str]:
    """Return the modules of hpc_det that functions of a module import."""
    functions = [each for each in ast.walk(ast.parse(code)) if isinstance(each, ast.FunctionDef)]
    found: set[str] = set()
    for each in (each for function in functions for each in ast.walk(function)):
        if isinstance(each, ast.ImportFrom) and each.module:
            found |= {name if is_module(name := f"{each.module}.{alias.name}") else each.module for alias in each.names}
        elif isinstance(each, ast.Import):
            found |= {alias.name for alias in each.names}
    return {name for name in found if name.partition(".")[0] == "hpc_det"}


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()
