"""A run has one driver: real processes claim a run, and some of them are killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_det.errors import UsageError
from hpc_det.node.files import write_first
from hpc_det.sgd.elastic.meeting import DriverAddress, check_free, claim
from hpc_det.store.run_folder import RunFolder
from tests.facts import refused, unnamed

NOWHERE = DriverAddress("127.0.0.1", 1)
"""The address of a driver that does not listen: only its running process protects its claim."""
PROGRAM = """
import sys
from pathlib import Path
from hpc_det.errors import UsageError
from hpc_det.sgd.elastic.meeting import claim
from hpc_det.sgd.elastic.meeting import DriverAddress
from hpc_det.store.run_folder import RunFolder

print("ready", flush=True)
for path in sys.stdin:
    try:
        claim(RunFolder(Path(path.strip())), DriverAddress("127.0.0.1", 1))
        print("has it", flush=True)
    except UsageError as error:
        print(error, flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    return folder


class Programs:
    def __init__(self, count: int) -> None:
        self._all = [
            subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]
        assert {self._said(program) for program in self._all} == {"ready"}

    def claim(self, run: RunFolder) -> list[str]:
        """Let all programs claim the run at once; return their answers."""
        for program in self._all:
            assert program.stdin
            program.stdin.write(f"{run.path}\n")
            program.stdin.flush()
        return [self._said(program) for program in self._all]

    def kill(self) -> None:
        for program in self._all:
            program.send_signal(signal.SIGKILL)
            program.communicate()

    @staticmethod
    def _said(program: subprocess.Popen[str]) -> str:
        assert program.stdout
        return program.stdout.readline().strip()


@pytest.mark.integration
def test_of_several_drivers_that_come_at_once_one_has_the_run(tmp_path: Path) -> None:
    runs = [RunFolder(tmp_path / str(number)) for number in range(4)]
    for run in runs:
        run.make()
    for _ in range(2):  # first a new run, then a run whose driver was killed
        programs = Programs(4)
        try:
            for run in runs:
                said = sorted(programs.claim(run))
                assert said.count("has it") == 1
                assert [unnamed(it, f"{run.path}: ", "127.0.0.1:1") for it in said if it != "has it"] == [[]] * 3
        finally:
            programs.kill()


def test_a_run_that_was_withdrawn_is_free(run: RunFolder) -> None:
    first = claim(run, NOWHERE)
    with refused(UsageError, f"{run.path}: ", "{}:{}".format(*NOWHERE)):
        check_free(run)
    first.withdraw()
    check_free(run)
    assert claim(run, NOWHERE).number == first.number + 1
    assert [path.name for path in run.drivers.iterdir()] == [f"{first.number + 1}.json"]


def test_whoever_was_too_slow_to_take_a_number_does_not_take_the_run(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(run, NOWHERE).withdraw()

    def after_two_others(path: Path, content: str) -> bool:
        patched.undo()
        claim(run, NOWHERE).withdraw()
        claim(run, NOWHERE)
        return write_first(path, content)

    with monkeypatch.context() as patched:
        patched.setattr("hpc_det.sgd.elastic.meeting.write_first", after_two_others)
        with refused(UsageError, f"{run.path}: ", "{}:{}".format(*NOWHERE)):
            claim(run, NOWHERE)
    assert [path.name for path in run.drivers.iterdir()] == ["3.json"]


def test_the_claim_on_a_folder_that_is_gone_is_withdrawn_without_a_word(run: RunFolder) -> None:
    mine = claim(run, NOWHERE)
    run.path.rename(run.path.with_name("elsewhere"))
    mine.withdraw()
