"""Runs on each host of a PBS job: starts a command, passes orders on to it, and writes its exit code (see HostFolder).

python3 -m hpc_det.schedulers.pbs.on_host FOLDER RANK COMMAND...
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpc_det.node.files import write_atomic
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants, exit_code
from hpc_det.schedulers.pbs.hosts import BEGUN, EXIT, ORDERS, POLL_S

GOODBYE_S = 3.0
"""Seconds that the command has to exit after the order "end"."""
_GPUS = "CUDA_VISIBLE_DEVICES"


def host_environment(rank: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the command: `env` with its rank and, if gangs share the job, only the GPUs of its
    gang.
    """
    found = {**env, "HPC_DET_NODE_RANK": rank}
    if slots := env.get("HPC_DET_SLOTS"):
        visible = env[_GPUS].split(",") if env.get(_GPUS) else None
        found[_GPUS] = ",".join(visible[int(slot)] if visible else slot for slot in slots.split(","))
    return found


def run(folder: Path, rank: str, command: list[str]) -> int:
    """Run the command until it exits or the order "end" arrives; return its exit code, or 1 after "end"."""
    signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
    process = subprocess.Popen(command, env=host_environment(rank, os.environ), stdin=subprocess.DEVNULL)
    is_sent = False
    # PBS sends its TERM to the command too, so a stop signal only wakes this loop and is not passed on.
    while process.poll() is None:
        select.select([signals.fd], [], [], POLL_S)
        signals.received()
        orders = _orders(folder)
        if "end" in orders:
            _await(process)
            return 1
        if "TERM" in orders and not is_sent:
            process.send_signal(signal.SIGTERM)
            is_sent = True
    return exit_code(process.returncode)


def _await(process: subprocess.Popen[bytes]) -> None:
    """Wait up to GOODBYE_S for the command to exit."""
    # Agents report their exits to node 0's agent when a gang ends. One that is killed before that looks like a lost
    # node.
    with suppress(subprocess.TimeoutExpired):
        process.wait(GOODBYE_S)


def _orders(folder: Path) -> list[str]:
    """Return the orders in the folder; "end" if the folder was deleted."""
    try:
        return (folder / ORDERS).read_text().split()
    except FileNotFoundError:
        # The program that started this process has deleted the folder or has ended with it.
        return ["end"]
    except OSError:  # for example, the file server is restarting
        return []


def main(argv: list[str]) -> int:
    """Run the command of this rank and record its start and its exit code in the folder."""
    folder, rank, *command = argv
    adopt_orphans()
    with suppress(FileNotFoundError):
        Path(folder, f"{BEGUN}{rank}").touch(mode=0o600)
    code = run(Path(folder), rank, command)
    end_descendants()
    with suppress(FileNotFoundError):
        write_atomic(Path(folder, f"{EXIT}{rank}"), str(code))
    # Always 0: after any other exit code, mpiexec would kill the processes on the other hosts.
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
