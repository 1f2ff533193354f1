"""Run Python programs in separate processes, because an imported module stays imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.wait import DEADLINE_S

HOOKED = ("-m", "hpc_det.compat")

# A Python process that has imported torch and the torch modules that hpc_det uses, but not hpc_det. Each program runs
# in a fork of it.
COPIES = """
import json, os, sys, traceback
import torch.distributed.fsdp

while line := sys.stdin.readline():
    program, output = json.loads(line)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        failed = False
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            failed = True
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(failed)  # an orderly end would take torch half a second
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=DEADLINE_S, env=env)


def printed(code: str, *, before: tuple[str, ...] = HOOKED) -> str:
    """Return the stdout of `code`; the program must exit with 0 and write nothing to stderr."""
    done = python(*before, "-c", code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


class Copies:
    """A Python process with the import hook and torch that forks for each program: importing torch takes most of the
    time.
    """

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output"
        command = [sys.executable, *HOOKED, "-c", COPIES]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def printed(self, code: str) -> str:
        """Return the output of `code`, which must exit with 0."""
        returned, said = self._run(code)
        assert returned == 0, said
        return said.strip()

    def refusal(self, code: str) -> str:
        """Return the last line of the traceback of `code`, which must fail."""
        returned, said = self._run(code)
        assert returned == 1, said
        return said.splitlines()[-1]

    def _run(self, code: str) -> tuple[int, str]:
        """Return the exit code of `code`, and its stdout and stderr."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([code, str(self._output)]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline()), self._output.read_text()

    def close(self) -> None:
        self._process.communicate(timeout=DEADLINE_S)
