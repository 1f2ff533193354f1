"""On each host of a PBS job: runs a command, passes orders on to it, and leaves its exit code (see HostFolder).

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
_GPUS = "CUDA_VISIBLE_DEVICES"


def host_environment(rank: str, env: Mapping[str, str]) -> dict[str, str]:
    """The command's: its rank, and of the GPUs that this host shows those of its gang, where several share the job."""
    found = {**env, "HPC_DET_NODE_RANK": rank}
    if slots := env.get("HPC_DET_SLOTS"):
        visible = env[_GPUS].split(",") if env.get(_GPUS) else None
        found[_GPUS] = ",".join(visible[int(slot)] if visible else slot for slot in slots.split(","))
    return found


def run(folder: Path, rank: str, command: list[str]) -> int:
    """The command's exit code; 1 where it was ended. PBS sends its TERM to the command, too, so here it is no news."""
    signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
    process = subprocess.Popen(command, env=host_environment(rank, os.environ), stdin=subprocess.DEVNULL)
    is_told = False
    while process.poll() is None:
        select.select([signals.fd], [], [], POLL_S)
        signals.received()
        orders = _orders(folder)
        if "end" in orders:
            _await(process)
            return 1
        if "TERM" in orders and not is_told:
            process.send_signal(signal.SIGTERM)
            is_told = True
    return exit_code(process.returncode)


def _await(process: subprocess.Popen[bytes]) -> None:
    """Agents tell each other of an end, and say goodbye: one that is killed before would look like a lost node."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(GOODBYE_S)


def _orders(folder: Path) -> list[str]:
    """Without a folder there is nobody left who would wait."""
    try:
        return (folder / ORDERS).read_text().split()
    except FileNotFoundError:
        return ["end"]
    except OSError:  # such as of a file server that is restarted
        return []


def main(argv: list[str]) -> int:
    """Exit code 0 always: mpiexec would kill the other processes after any other one."""
    folder, rank, *command = argv
    adopt_orphans()
    with suppress(FileNotFoundError):
        Path(folder, f"{BEGUN}{rank}").touch(mode=0o600)
    code = run(Path(folder), rank, command)
    end_descendants()
    with suppress(FileNotFoundError):
        write_atomic(Path(folder, f"{EXIT}{rank}"), str(code))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
