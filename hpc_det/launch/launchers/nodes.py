"""How the launchers of a gang's nodes work together, where one of them leads: the one on node 0.

It alone starts mpirun or srun. The others wait: they start on their node what mpirun wants there, so that ranks are
descendants of their own node's agent, and neither ssh nor the scheduler is needed. At last they hear from node 0 which
exit code the gang has, and end with it.

mpirun calls this module as it would call ssh: python3 -m hpc_det.launch.launchers.nodes [-x] HOST COMMAND... HOST is a
name that `host_name` made; the launcher that waits on that node runs COMMAND, as long as this process lives.

Each publishes where it listens in a file beside the rendezvous. The lines between them are those of hpc_det.node, with
a key from the attempt's secret, which is never sent.
"""

from __future__ import annotations

import ipaddress
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.key import derived
from hpc_det.node.line_server import TcpLineServer
from hpc_det.node.lines import Line, connect
from hpc_det.node.network import WAIT_S, awaited
from hpc_det.node.process import block_stop_signals, exit_code
from hpc_det.node.suspension import AwakeClock
from hpc_det.store.attempt import Attempt, failure_now, note_failure

CONNECTION_LOST = 255
"""As ssh(1) says it."""
_FIRST = ipaddress.IPv4Address("198.18.0.0")  # no host has these: they are for benchmarks of networks (RFC 2544)
_CONNECT_S = 10.0
_AT_ONCE = 32
_VERDICT_S = 10.0
"""How long node 0 may take to say how the gang ended, after it has let go of what it asked for."""
_CHILDREN_LEAVE_S = 5.0
_OF_A_NODE = (
    *("HPC_DET_NODE_RANK", "HPC_DET_SOCKET", "HPC_DET_ADDRESS"),
    *("TMPDIR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
)


def run_gang(attempt: Attempt, command: Callable[[], Sequence[str]]) -> int:
    """The gang's exit code, on every node. `command` is asked for on node 0, and may raise UsageError."""
    if attempt.node_rank > 0:
        return FollowingLauncher(attempt).serve()
    _publish(attempt)
    code = _lead(attempt, command)
    _publish(attempt, ended=code)  # for launchers that come to listen only now
    with ThreadPoolExecutor(_AT_ONCE) as threads:  # one that is gone may take its time
        for node in range(1, attempt.nodes):
            threads.submit(_end, attempt, node, code)
    return code


def _end(attempt: Attempt, node: int, code: int) -> None:
    with suppress(HpcDetError):
        if at := read_json(attempt.trial.launcher(attempt.number, node)):
            line = _call(attempt, at)
            line.send({"end": code})
            line.close()


def _lead(attempt: Attempt, command: Callable[[], Sequence[str]]) -> int:
    try:
        ended = subprocess.run(command(), stdin=subprocess.DEVNULL).returncode
    except (OSError, UsageError) as error:
        message = str(error) if isinstance(error, UsageError) else f"{error.filename}: {error.strerror}"
        note_failure(attempt.trial, attempt.number, failure_now(None, message, user_error=True))
        print(f"hpc-det: {message}", file=sys.stderr, flush=True)
        return 1
    return exit_code(ended)


def run_on(attempt: Attempt, node: int, command: str) -> int:
    """Have a shell on another node run `command`, as long as this call waits for it; its exit code.

    Raises HpcDetError where the node's launcher does not publish itself, or refuses.
    """
    line = _call(attempt, _read(attempt.trial.launcher(attempt.number, node)))
    line.send({"run": command})
    answer = line.receive()
    line.close()
    return int(answer.head["code"]) if answer else CONNECTION_LOST


def environment_of(attempt: Attempt, node: int) -> dict[str, str]:
    """What differs on each node, for a rank that the scheduler started with the environment of node 0."""
    told: dict[str, str] = _read(attempt.trial.launcher(attempt.number, node))["environment"]
    return told


class FollowingLauncher:
    """The launcher of a node that does not lead: it listens for requests over authenticated lines (hpc_det.node)."""

    def __init__(self, attempt: Attempt) -> None:
        self.children: dict[Line, subprocess.Popen[bytes]] = {}
        """By the line of whoever asked for it."""
        self._attempt = attempt
        self._board = TcpLineServer(attempt.address, lambda identity: _key(attempt), lambda address: True)
        self._code: int | None = None

    @property
    def address(self) -> tuple[str, int]:
        return self._board.host, self._board.port

    def serve(self) -> int:
        """Until node 0 says how the gang ended."""
        _publish(self._attempt, port=self._board.port)
        leading = read_json(self._attempt.trial.launcher(self._attempt.number, 0))
        if leading and "ended" in leading:
            self._code = int(leading["ended"])
        patience: AwakeClock | None = None
        while self._code is None:
            try:
                event = self._board.events.get(timeout=1.0)
            except queue.Empty:
                if patience and patience.seconds() > _VERDICT_S:
                    self._code = 1
                continue
            if event.kind == "said" and event.message:
                self._obey(event.line, event.message.head)
            elif event.kind == "gone" and event.line in self.children:  # then the gang ends
                _kill(self.children[event.line])
                patience = patience or AwakeClock()
        self._board.close()
        self._await_children()
        return self._code

    def _obey(self, line: Line, request: dict[str, Any]) -> None:
        if "end" in request:
            self._code = int(request["end"])
        elif "run" in request:
            command = ["/bin/bash", "-c", str(request["run"])]
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            self.children[line] = child
            threading.Thread(target=_report, args=[child, line], daemon=True).start()

    def _await_children(self) -> None:
        end = time.monotonic() + _CHILDREN_LEAVE_S
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))


def _report(child: subprocess.Popen[bytes], line: Line) -> None:
    line.send({"code": exit_code(child.wait())})
    line.close()


def _kill(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _call(attempt: Attempt, at: dict[str, Any]) -> Line:
    """Raises HpcDetError where the launcher there does not listen, or not any more."""
    listener = f"the launcher of {at['host']}"
    identity = {"role": "launcher"}
    return connect(
        at["host"], at["port"], _key(attempt), identity, _CONNECT_S, listener=listener, awaits_listener=False
    )


def _key(attempt: Attempt) -> bytes:
    return derived(attempt.secret.encode(), "launchers")


def _publish(attempt: Attempt, **of_this_node: int) -> None:
    told = {name: os.environ[name] for name in _OF_A_NODE if name in os.environ}
    where = {"host": attempt.address, "environment": told, **of_this_node}
    write_json(attempt.trial.launcher(attempt.number, attempt.node_rank), where, private=True)


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] | None = awaited(path, WAIT_S)
    if told is None:
        raise HpcDetError(f"{path}: the launcher of this node published nothing in {WAIT_S:.0f} s; does it run there?")
    return told


# --- mpirun's remote shell


def host_name(node: int) -> str:
    """What mpirun calls a node: number 0 is its own; the others look like addresses, which nobody looks up."""
    return str(_FIRST + node) if node else "localhost"


def node_of(host: str) -> int:
    return int(ipaddress.IPv4Address(host)) - int(_FIRST)


def main(argv: list[str]) -> int:
    host, *command = [word for word in argv[:1] if word != "-x"] + argv[1:]
    try:
        return run_on(Attempt.from_env(os.environ), node_of(host), " ".join(command))
    except (HpcDetError, OSError) as error:
        print(f"hpc-det: node {host}: {error}", file=sys.stderr, flush=True)
        return CONNECTION_LOST


if __name__ == "__main__":
    block_stop_signals()  # mpirun starts it with all signals as usual
    sys.exit(main(sys.argv[1:]))
