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
        """Assert that the exit code is 0, stderr is empty, and stdout names each of `facts` in any wording."""
        assert (self.code, self.err, unnamed(self.out, *facts)) == (0, "", [])
        return True

    def fails(self, code: int, *facts: object) -> bool:
        """Assert that the exit code is `code`, stdout is empty, and stderr names each of `facts` in any wording."""
        assert (self.code, self.out, unnamed(self.err, *facts)) == (code, "", [])
        return True


Command = Callable[..., Result]


@pytest.fixture(autouse=True)
def umask(no_leaks: None) -> Iterator[None]:
    """Restore the umask, which the command line changes for the whole process."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the state folder of the commands, which does not exist yet."""
    folder = tmp_path / "states"
    monkeypatch.setenv("HPC_DET_ROOT", str(folder))
    return folder


@pytest.fixture
def hpc_det(root: Path, capfd: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs hpc-det in this process. An error that is not a user error raises an exception."""

    def run(*arguments: object) -> Result:
        code = main([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """Return a context directory with a complete trial."""
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
    """Return a function that makes an executable from a name and shell code. PATH has no other Slurm commands."""
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
    """Return experiment 1, submitted to Slurm as job 4711."""
    return Life.submitted(root)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """Return a fake that replaces the scheduler of every experiment."""
    importlib.import_module("hpc_det.submit.render")  # if it were imported later, it would keep the fake
    fake = FakeScheduler()
    monkeypatch.setattr("hpc_det.schedulers.scheduler.scheduler", lambda name: fake)
    return fake
