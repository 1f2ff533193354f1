"""Run a `python3` command in a process that is forked from one with torch loaded, so that it starts at once."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import site
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc_det.launch import rank
from hpc_det.launch.launchers.arguments import is_trial
from hpc_det.node.forking import leave


def become(program: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """Run `python3 PROGRAM` (a trial's rank or a script) in this process and folder, then exit."""
    # Otherwise a child of the fork server would make the server start its DataLoader workers, too.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    sys.modules.pop("sitecustomize", None)
    site.execsitecustomize()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in environment)
    leave(_exit_code(program))


def _exit_code(program: Sequence[str]) -> int:
    return rank.main(program[2]) if is_trial(program) else _exit_code_of_script(program)


def _exit_code_of_script(program: Sequence[str]) -> int:
    sys.argv[:] = program
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.stdout.flush()  # as the interpreter does, so that the error is the last output
        traceback.print_exc()
        return 1
    return 0
