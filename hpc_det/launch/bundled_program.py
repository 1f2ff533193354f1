"""Runs a Python program, which imports installed packages from the bundle that HPC_DET_BUNDLE names.

    python3 -m hpc_det.launch.bundled_program (FILE | -m MODULE) ARGS...

It is used by launchers that execute a Python for each rank (hpc_det.launch.launchers.arguments.with_bundle).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from hpc_det.launch.forked_ranks import run_file
from hpc_det.node.frame_modules import modules_from_frames
from hpc_det.node.import_bundle import import_from_bundle


def main(command: Sequence[str]) -> int:
    """Run the program and return its exit code; a module's SystemExit is raised."""
    import_from_bundle(os.environ)
    with modules_from_frames():
        if command[0] != "-m":
            return run_file(command)
        sys.argv[:] = command[1:]  # run_module replaces the first, by the module's file
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
