"""The tasks of one node. As a program, those of a node other than the first."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from hpc_det.node.process import exit_code
from hpc_det.submit.submitit_pbs.paths import PbsJobPaths


def start_tasks(folder: str, command: str, node: int, *, stderr_to_stdout: bool) -> list[subprocess.Popen[bytes]]:
    """Start `command`, a shell command, for each task of the node; see PbsJobEnvironment for its environment."""
    per_node = int(os.environ["SUBMITIT_PBS_NTASKS"]) // int(os.environ["SUBMITIT_PBS_NNODES"])
    return [
        _start(folder, command, node, local, node * per_node + local, stderr_to_stdout) for local in range(per_node)
    ]


def first_failure(returncodes: Sequence[int]) -> int:
    """Return the exit code of the first failed task, or 0."""
    return next((exit_code(code) for code in returncodes if code), 0)


def _start(
    folder: str, command: str, node: int, local: int, rank: int, stderr_to_stdout: bool
) -> subprocess.Popen[bytes]:
    paths = PbsJobPaths(folder, job_id=os.environ["SUBMITIT_PBS_JOB_ID"], task_id=rank)
    who = {"NODEID": node, "GLOBALID": rank, "LOCALID": local}
    with ExitStack() as logs:
        stdout = logs.enter_context(paths.stdout.open("ab"))
        stderr = subprocess.STDOUT if stderr_to_stdout else logs.enter_context(paths.stderr.open("ab"))
        return subprocess.Popen(
            # PBS sends SIGTERM to all processes of the first node; it would end a task that has no handler yet.
            ["/bin/bash", "-c", f"trap '' TERM; exec {command}"],
            env=os.environ | {f"SUBMITIT_PBS_{name}": str(value) for name, value in who.items()},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("command")
    parser.add_argument("--stderr-to-stdout", action="store_true")
    asked = parser.parse_args()
    node = int(os.environ.pop("HPC_DET_NODE_RANK"))  # set by hpc_det.schedulers.pbs.on_host, and not for tasks
    tasks = start_tasks(asked.folder, asked.command, node, stderr_to_stdout=asked.stderr_to_stdout)
    sys.exit(first_failure([task.wait() for task in tasks]))


if __name__ == "__main__":
    main()
