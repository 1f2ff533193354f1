"""Mounts a squashfs image of a Python environment for an agent (hpc_det.launch.staged).

The process that serves the image is a child of the agent. The agent detaches the mount at its end; processes that
still run can then read the files that they have open. If the agent is killed, the kernel ends the serving process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

from hpc_det.node import mounts
from hpc_det.node.environment_archive import NotStaged
from hpc_det.node.process import ends_with_parent, ignore_stop_signals, spare

MOUNT = "HPC_DET_MOUNT"
"""The variable with the serving process and the folder of a mounted image, PID:FOLDER."""
MOUNTERS = ("squashfuse_ll", "squashfuse", "/usr/libexec/apptainer/bin/squashfuse_ll")
_DETACH = (["fusermount3", "-uz"], ["fusermount", "-uz"], ["umount", "-l"])


def mount(image: str, folder: str, wait: Callable[[], None]) -> None:
    """Mount the image in `folder`, and name the mount in the environment. Raises NotStaged.

    `wait`: waits a moment, and raises NotStaged after the longest time.
    """
    detach(folder)  # the mount of an agent that was killed
    os.makedirs(folder, exist_ok=True)
    why = "neither squashfuse nor apptainer is installed on this node"
    for program in filter(None, map(shutil.which, MOUNTERS)):
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [program, "-f", image, folder],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=_serves,
            )
            with suppress(NotStaged):
                while process.poll() is None:
                    if _is_mounted(folder):
                        os.environ[MOUNT] = f"{process.pid}:{folder}"
                        return
                    wait()
            process.kill()
            process.wait()
            why = f"{program} failed: {last_line(said)}"
    raise NotStaged(f"{why}; use `environment.stage: tar`")


@contextmanager
def until_the_end() -> Iterator[None]:
    """At the end of the block, detach the mount that the environment names, if any."""
    pid, _, folder = os.environ.pop(MOUNT, "").partition(":")
    if pid:
        spare(int(pid))  # from the end of all processes of an attempt
    try:
        yield
    finally:
        if pid:
            detach(folder)


def detach(folder: str) -> None:
    """Detach the mount in this folder, if there is one."""
    for command in _DETACH:
        if _is_mounted(folder) and shutil.which(command[0]):
            subprocess.run([*command, folder], stdin=subprocess.DEVNULL, capture_output=True)


def last_line(said: IO[bytes]) -> str:
    """Return the last line of a program's output, for a message."""
    said.seek(0)
    lines = said.read()[-4096:].decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _serves() -> None:
    """Prepare the process that serves an image."""
    ignore_stop_signals()  # Slurm sends them to all processes of a step, and the ranks still have to save
    # Except this one, after which it unmounts the image: the kernel sends it if the agent is killed.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    ends_with_parent(signal.SIGHUP)


def _is_mounted(folder: str) -> bool:
    rows = [line.split() for line in mounts.MOUNTS.read_text().splitlines()]
    return any(row[1].replace(r"\040", " ") == folder for row in rows if len(row) > 1)
