"""Ranks that are forked from a process with torch, and disturbed together with it."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hpc_det.distributed.collectives import Distributed

ENDS_S = 60.0
"""Seconds in which the other ranks must end after one was killed."""


def on_forked_ranks(size: int, rank: Callable[[Distributed], None], nodes: int = 1) -> None:
    """Run `rank` on each rank of so many simulated nodes, and wait for all.

    Raise if one fails although none was killed, or does not end.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = [_forked(size, number, size // nodes, server.port, rank) for number in range(size)]
    statuses = [_ended(pid) for pid in pids]
    if -signal.SIGKILL not in statuses and any(statuses):
        raise AssertionError(f"ranks ended with {statuses}; their output says why")


def _forked(size: int, number: int, local: int, port: int, rank: Callable[[Distributed], None]) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        os.environ.update(HPC_DET_SECRET="the secret of these ranks", CUDA_VISIBLE_DEVICES="")
        os.environ.update(RANK=str(number), WORLD_SIZE=str(size))
        os.environ.update(LOCAL_RANK=str(number % local), LOCAL_WORLD_SIZE=str(local))
        distributed = Distributed.from_env(os.environ)
        distributed.start()
        rank(distributed)
        distributed.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _ended(pid: int) -> int:
    """Return its exit code, or the negative number of the signal that ended it."""
    deadline = time.monotonic() + ENDS_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
            os.waitpid(pid, 0)
            raise AssertionError(f"rank process {pid} has not ended in {ENDS_S:.0f} s")
        time.sleep(0.005)
