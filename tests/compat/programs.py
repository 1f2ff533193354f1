"""Programs in Pythons of their own, since what is imported once stays imported."""

from __future__ import annotations

import subprocess
import sys

HOOKED = ("-m", "hpc_det.compat")


def python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=env)


def printed(code: str, *, before: tuple[str, ...] = HOOKED) -> str:
    """What `code` prints; it must end well and say nothing on stderr."""
    done = python(*before, "-c", code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def refusal(code: str) -> str:
    """The last line of the traceback that `code` ends with."""
    done = python(*HOOKED, "-c", code)
    assert done.returncode == 1, done.stdout
    return done.stderr.splitlines()[-1]
