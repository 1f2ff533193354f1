"""Processes that the driver has started: in sessions of their own, ended for sure."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_det.node.process import descendants

Process = subprocess.Popen[bytes]

LEAVE_S = 10.0
"""For node agents to leave by themselves, once the driver has hung up: they may have a snapshot to write."""
TERM_S = 3.0
POLL_S = 0.02


def start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Where a Ctrl-C at the terminal does not reach it: the driver hears it first. What it prints goes to `log`."""
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def all_ended(processes: Collection[Process], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def kill(process: Process) -> None:
    """It and what descends from it."""
    for pid in [process.pid, *descendants(process.pid)] if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
