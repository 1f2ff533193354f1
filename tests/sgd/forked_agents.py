"""Fork node agents from a process that has loaded torch, and fork servers from the agents, so that gangs start fast."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from hpc_det.distributed.rank_process import log_to
from hpc_det.node import fork_server
from hpc_det.node.fork_server import ForkServerProcess
from hpc_det.node.lines import line_over
from hpc_det.node.process import STOP_SIGNALS, ends_with_parent
from hpc_det.sgd.elastic import node


class Forked:
    """The part of subprocess.Popen that callers of an agent or a fork server use."""

    def __init__(self, process: BaseProcess) -> None:
        process.start()
        assert process.pid
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def start_agent(arguments: Sequence[str], log: Path) -> Forked:
    """Start the equivalent of `python3 -m hpc_det.sgd.elastic.node` with these arguments. Needs the fork server."""
    its = (arguments, log, dict(os.environ), Path.cwd())
    return Forked(multiprocessing.get_context("forkserver").Process(target=_agent, args=its))


def _agent(arguments: Sequence[str], log: Path, env: dict[str, str], folder: Path) -> None:
    # Otherwise the workers of this process would be started by the fork server.
    multiprocessing.set_start_method("fork", force=True)
    os.setsid()
    log_to(log)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    ForkServerProcess.start = _start_fork_server  # type: ignore[assignment, method-assign]
    raise SystemExit(node.main([*arguments]))


def _start_fork_server(modules: Sequence[str], *, files: Sequence[int]) -> ForkServerProcess:
    own, its = socket.socketpair()
    with its:
        process = Forked(multiprocessing.get_context("fork").Process(target=_fork_server, args=(own, its, modules)))
    return ForkServerProcess(process, line_over(own))  # type: ignore[arg-type]


def _fork_server(agents: socket.socket, its: socket.socket, modules: Sequence[str]) -> None:
    os.setsid()
    ends_with_parent()
    agents.close()
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # The parent has imported more than a node's fork server does, and a torch that is built with CUDA may have queried
    # the GPUs, which the ranks of these tests do not use.
    fork_server.why_not_to_fork = lambda: None  # type: ignore[attr-defined]
    raise SystemExit(fork_server.main([str(its.detach()), *modules, "--"]))
