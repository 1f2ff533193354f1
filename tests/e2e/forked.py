"""Run the command line in forks of a process with torch, whose import takes most of the time of a run of one batch."""

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
"""hpc_det_with_torch(*arguments): return the output and the exit code of `hpc-det` with these arguments."""


@pytest.fixture
def hpc_det_with_torch(_fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> WithTorch:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        output = tmp_path_factory.mktemp("output")
        words = [str(argument) for argument in arguments]
        process = multiprocessing.get_context("forkserver").Process(target=_main, args=(words, {**os.environ}, output))
        process.start()
        process.join(DEADLINE_S)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        out, err = ((output / name).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, process.exitcode, out, err)

    return run


def _main(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch would need half a second for an orderly exit
