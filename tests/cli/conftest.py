from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hpc_det.cli.main import main
from hpc_det.submit import render  # noqa: F401  # before a test replaces the schedulers that it takes
from tests.cli.life import FakeScheduler, Life
from tests.facts import unnamed

TRIAL = """
from hpc_det.pytorch import PyTorchTrial

class MyTrial(PyTorchTrial):
    def train_batch(self, batch, epoch_idx, batch_idx): ...
    def build_training_data_loader(self): ...
    def build_validation_data_loader(self): ...
    def evaluate_batch(self, batch): ...
"""
CONFIG = """
name: tiny
entrypoint: model_def:MyTrial
searcher: {metric: accuracy, max_length: 10}
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str

    def succeeds(self, *facts: object) -> bool:
        """The exit code is 0, stderr is empty, and stdout names each of `facts`, whatever its wording."""
        assert (self.code, self.err, unnamed(self.out, *facts)) == (0, "", [])
        return True

    def fails(self, code: int, *facts: object) -> bool:
        """The exit code is `code`, stdout is empty, and stderr names each of `facts`, whatever its wording."""
        assert (self.code, self.out, unnamed(self.err, *facts)) == (code, "", [])
        return True


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def umask(no_leaks: None) -> Iterator[None]:
    """The command line takes a umask of its own, which is the process's: the tests'."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the commands, not there yet."""
    folder = tmp_path / "root"
    monkeypatch.setenv("HPC_DET_ROOT", str(folder))
    return folder


@pytest.fixture
def hpc_det(root: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """hpc-det in this process. An error that is not the user's comes through as an exception."""

    def run(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A context directory with a whole trial."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "model_def.py").write_text(TRIAL)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG)
    return file


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes an executable of this name with this shell code; no other command of a Slurm is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for needed in ("bash", "cp", "env"):
        (folder / needed).symlink_to(Path("/bin") / needed)
    monkeypatch.setenv("PATH", str(folder))

    def make(name: str, body: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def life(root: Path) -> Life:
    """Experiment 1, submitted to Slurm as job 4711."""
    return Life.submitted(root)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """What every experiment's scheduler answers."""
    importlib.import_module("hpc_det.submit.render")  # it would keep the fake
    fake = FakeScheduler()
    monkeypatch.setattr("hpc_det.schedulers.scheduler.scheduler", lambda name: fake)
    return fake
