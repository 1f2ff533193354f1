"""The leak check works: each kind of leak fails its test, and a clean test passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wait import wait_for

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[1]

TESTS = """
import os, subprocess, threading, time
import pytest
from tests import conftest
conftest.ENDS_S = 0
pytestmark = pytest.mark.integration
held, over = [], threading.Event()
def teardown_module(): over.set()
def test_process(): held.append(subprocess.Popen(["sleep", "7531"], stdout=subprocess.PIPE))
def test_reparented_process(): subprocess.run(["sh", "-c", "setsid sleep 7532 & exit"])
def test_spawned_process(): os.posix_spawn("/bin/sleep", ["sleep", "7533"], os.environ)
def test_variable_set(): os.environ["LEFT_BEHIND"] = "x"
def test_variable_unset(): del os.environ["PATH"]
def test_umask(): os.umask(0o077)
def test_thread(): threading.Thread(target=over.wait, name="lingerer").start()
def test_clean(monkeypatch):
    conftest.ENDS_S = 2
    held.clear()  # an unwaited Popen would warn here
    monkeypatch.setenv("TIDY", "1")
    subprocess.run(["true"])
    threading.Thread(target=time.sleep, args=(0.1,)).start()
"""

LEAKS = {
    "test_process": r"process \d+ still runs: sleep 7531",
    "test_reparented_process": r"process \d+ still runs: .*sleep 7532",  # the command may still be the shell's
    "test_spawned_process": r"process \d+ still runs: sleep 7533",
    "test_variable_set": "changed environment variable LEFT_BEHIND",
    "test_variable_unset": "changed environment variable PATH",
    "test_umask": "umask 077, not 022 as before",
    "test_thread": "thread still runs: lingerer",
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return, by test, the error that a separate pytest with our conftest reports at its teardown."""
    test = tmp_path_factory.mktemp("leaking") / "test_leaking.py"
    test.write_text(TESTS)
    options = ["-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(test)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, umask=0o022)
    assert f" {len(LEAKS) + 1} passed, {len(LEAKS)} errors in " in done.stdout, done.stdout + done.stderr
    report = done.stdout.partition("short test summary")[0]
    sections = re.split(r"_+ ERROR at teardown of (\w+) _+\n", report)[1:]
    return dict(zip(sections[::2], sections[1::2], strict=True))


@pytest.mark.parametrize(("test", "leak"), LEAKS.items(), ids=LEAKS.keys())
def test_what_is_left_behind_fails_the_test(errors: dict[str, str], test: str, leak: str) -> None:
    assert re.search("this test left behind:\n" + leak, errors[test])


def test_a_test_that_cleans_up_passes(errors: dict[str, str]) -> None:
    assert errors.keys() == LEAKS.keys()


def test_a_leaked_process_is_ended(errors: dict[str, str]) -> None:
    pids = re.findall(r"process (\d+) still runs", "".join(errors.values()))
    assert len(pids) == 3
    wait_for(lambda: not [pid for pid in pids if os.access(f"/proc/{pid}/exe", os.R_OK)])


def test_a_test_has_a_state_folder_of_its_own(state_folder: Path) -> None:
    assert os.environ["HPC_DET_ROOT"] == str(state_folder)
    assert list(state_folder.iterdir()) == []


def test_a_failure_tells_how_busy_the_machine_was(errors: dict[str, str]) -> None:
    assert re.search(r"the machine, after \d+ s -+\nload: \(.*\n(.+: some avg10=.*\n)*stolen: \d", errors["test_umask"])


def test_the_folder_of_killed_tests_is_removed_by_the_next_ones_and_that_of_living_ones_is_kept() -> None:
    def begin() -> tuple[subprocess.Popen[str], Path]:
        code = "from tests import conftest; print(conftest.LINKS.name, flush=True); input()"
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout
        return process, Path(process.stdout.readline().strip())

    killed, left = begin()
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    living, kept = begin()
    assert not left.exists()
    third, _folder = begin()
    assert kept.is_dir()
    for process in (living, third):
        process.communicate("\n")
        assert process.returncode == 0
    assert not kept.exists()
