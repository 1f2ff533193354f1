"""The command line in copies of a process that has loaded torch, which is most of what a single batch takes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_det.cli.main import main
from tests.distributed.ranks import _fork_server
from tests.wait import DEADLINE_S

__all__ = ["WithTorch", "_fork_server", "hpc_det_with_torch"]

WithTorch = Callable[..., "subprocess.CompletedProcess[str]"]
"""hpc_det_with_torch(*arguments): what `hpc-det` with them printed, and its exit code."""


@pytest.fixture
def hpc_det_with_torch(_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> WithTorch:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        said = tmp_path_factory.mktemp("said")
        words = [str(argument) for argument in arguments]
        process = multiprocessing.get_context("forkserver").Process(target=_main, args=(words, {**os.environ}, said))
        process.start()
        process.join(DEADLINE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        out, err = ((said / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, process.exitcode, out, err)

    return run


def _main(arguments: list[str], environment: dict[str, str], said: Path) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(said / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly end would take torch half a second
