"""The leak check can fire: each kind of leak fails its test, and a clean test passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

LEAKS = {
    "process 1": ("subprocess.Popen(['sleep', '7531'])", "sleep 7531"),
    "re-parented process": ("subprocess.run(['sh', '-c', 'setsid sleep 7532 & exit'])", "sleep 7532"),
    "forked process": ("os.fork() or time.sleep(7533)", "still runs: "),
    "variable set": ("os.environ['LEFT_BEHIND'] = 'x'", "changed environment variable LEFT_BEHIND"),
    "variable unset": ("del os.environ['PATH']", "changed environment variable PATH"),
    "thread": ("threading.Thread(target=time.sleep, args=(6,), name='lingerer').start()", "lingerer"),
}


def run_test(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Runs one test of this body under our conftest, in a pytest of its own."""
    test = folder / "test_it.py"
    test.write_text(f"import os, subprocess, threading, time\ndef test_it():\n    {body}\n")
    options = ["-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider", "-q", "-W", "default"]
    command = [sys.executable, "-m", "pytest", *options, str(test)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


@pytest.mark.parametrize(("body", "message"), LEAKS.values(), ids=LEAKS.keys())
def test_what_is_left_behind_fails_the_test(tmp_path: Path, body: str, message: str) -> None:
    done = run_test(tmp_path, body)
    assert done.returncode == 1, done.stdout
    assert "this test left behind:" in done.stdout
    assert message in done.stdout


def test_a_test_that_cleans_up_passes(tmp_path: Path) -> None:
    done = run_test(tmp_path, "subprocess.run(['true']); threading.Thread(target=print).start()")
    assert done.returncode == 0, done.stdout


def test_a_test_has_a_state_folder_of_its_own(state_folder: Path) -> None:
    assert os.environ["HPC_DET_ROOT"] == str(state_folder)
    assert list(state_folder.iterdir()) == []
