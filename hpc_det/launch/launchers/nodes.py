"""Cooperation of the launchers of a gang's nodes: the launcher on node 0 leads, the others follow.

The leading launcher alone starts mpirun or srun. The following launchers wait for requests and start on their nodes
what mpirun needs there, so that ranks are descendants of the agent on their node, and neither ssh nor the scheduler is
needed. In the end node 0 sends them the gang's exit code, and they exit with it.

mpirun calls this module as it would call ssh:

    python3 -m hpc_det.launch.launchers.nodes [-x] HOST COMMAND...

HOST is a name from `host_name`. The launcher on that node runs COMMAND, and kills it when the calling process exits.
The flag -x, which turns off X11 forwarding in ssh, has no effect.

Each launcher publishes its address in a file beside the rendezvous. They use the connections of hpc_det.node, with a
key derived from the attempt's secret, which is never sent.
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
from hpc_det.launch.hook_environment import changed_names, environment_after
from hpc_det.node.json_files import read_json, write_json
from hpc_det.node.key import derived
from hpc_det.node.line_server import TcpLineServer
from hpc_det.node.lines import Line, connect
from hpc_det.node.network import WAIT_S, awaited
from hpc_det.node.process import block_stop_signals, exit_code
from hpc_det.node.suspension import AwakeClock
from hpc_det.store.attempt import Attempt, failure_now, note_failure

CONNECTION_LOST = 255
"""Exit code of ssh(1) for a lost connection."""
_FIRST = ipaddress.IPv4Address("198.18.0.0")  # for benchmarks of networks (RFC 2544), so no host has these
_CONNECT_S = 10.0
"""Seconds for the connection to another node's launcher."""
_AT_ONCE = 32
"""Number of launchers that node 0 contacts at the same time."""
_VERDICT_S = 10.0
"""Seconds in which node 0 must send the gang's exit code after it has closed the connection of a request."""
_CHILDREN_LEAVE_S = 5.0
"""Seconds for the processes started here to exit when the gang has ended."""
_OF_A_NODE = (
    *("HPC_DET_NODE_RANK", "HPC_DET_SOCKET", "HPC_DET_ADDRESS"),
    *("TMPDIR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DET_AGENT_ID", "DET_INTER_NODE_NETWORK_INTERFACE"),
)
"""Environment variables whose values differ between nodes."""


def run_gang(attempt: Attempt, command: Callable[[], Sequence[str]]) -> int:
    """Run the gang and return its exit code, on every node.

    `command`: returns the command to start; called on node 0 only, and may raise UsageError.
    """
    if attempt.node_rank > 0:
        return FollowingLauncher(attempt).serve()
    _publish(attempt)
    code = _lead(attempt, command)
    _publish(attempt, ended=code)  # for launchers that start to listen only now
    # In parallel, because a connection to a dead node takes up to _CONNECT_S to fail.
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for node in range(1, attempt.nodes):
            threads.submit(_end, attempt, node, code)
    return code


def _end(attempt: Attempt, node: int, code: int) -> None:
    """Send the gang's exit code to the launcher on `node`; ignore errors."""
    with suppress(HpcDetError):
        if at := read_json(attempt.trial.launcher(attempt.number, node)):
            line = _call(attempt, at)
            line.send({"end": code})
            line.close()


def _lead(attempt: Attempt, command: Callable[[], Sequence[str]]) -> int:
    """Run the command and return its exit code; note a failure to start it."""
    try:
        ended = subprocess.run(command(), stdin=subprocess.DEVNULL).returncode
    except (OSError, UsageError) as error:
        message = str(error) if isinstance(error, UsageError) else f"{error.filename}: {error.strerror}"
        note_failure(attempt.trial, attempt.number, failure_now(None, message, user_error=True))
        print(f"hpc-det: {message}", file=sys.stderr, flush=True)
        return 1
    return exit_code(ended)


def run_on(attempt: Attempt, node: int, command: str) -> int:
    """Run `command` in a shell on another node and return its exit code; CONNECTION_LOST if the connection ends first.

    The other node kills the command when this process exits. Raises HpcDetError if that node's launcher does not
    publish its address or refuses the connection.
    """
    line = _call(attempt, _read(attempt.trial.launcher(attempt.number, node)))
    line.send({"run": command})
    answer = line.receive()
    line.close()
    return int(answer.head["code"]) if answer else CONNECTION_LOST


def environment_of(attempt: Attempt, node: int) -> dict[str, str | None]:
    """Return the variables that differ on this node, for a rank that was started with node 0's environment.

    `node`: this node's rank. None: unset here.
    """
    variables: dict[str, str] = _read(attempt.trial.launcher(attempt.number, node))["environment"]
    by_node_0 = _read(attempt.trial.launcher(attempt.number, 0))["hook"]
    return {**environment_after(variables["HPC_DET_SOCKET"], by_node_0), **variables}


class FollowingLauncher:
    """The launcher of a node other than node 0: it executes requests over authenticated connections."""

    def __init__(self, attempt: Attempt) -> None:
        self.children: dict[Line, subprocess.Popen[bytes]] = {}
        """The processes started, keyed by the connection of their request."""
        self._attempt = attempt
        # Callers from any address: a caller proves that it belongs to the gang by its key.
        self._board = TcpLineServer(attempt.address, lambda identity: _key(attempt), lambda address: True)
        self._code: int | None = None
        """The gang's exit code once it is known."""

    @property
    def address(self) -> tuple[str, int]:
        return self._board.host, self._board.port

    def serve(self) -> int:
        """Execute requests until node 0 sends the gang's exit code, and return it."""
        _publish(self._attempt, port=self._board.port)
        # The gang may have ended before this launcher published its address. Node 0 publishes the exit code before it
        # looks for addresses, and this launcher does the opposite, so one of them finds the other's file.
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
            elif event.kind == "gone" and event.line in self.children:  # mpirun has exited, so the gang ends
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
        """Wait until the processes started here have exited, for at most _CHILDREN_LEAVE_S."""
        end = time.monotonic() + _CHILDREN_LEAVE_S
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))


def _report(child: subprocess.Popen[bytes], line: Line) -> None:
    """Wait until `child` has exited, and send its exit code."""
    line.send({"code": exit_code(child.wait())})
    line.close()


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group of `child`."""
    if child.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _call(attempt: Attempt, at: dict[str, Any]) -> Line:
    """Connect to another node's launcher. Raises HpcDetError if it does not listen (any more)."""
    listener = f"the launcher of {at['host']}"
    identity = {"role": "launcher"}
    return connect(
        at["host"], at["port"], _key(attempt), identity, _CONNECT_S, listener=listener, awaits_listener=False
    )


def _key(attempt: Attempt) -> bytes:
    return derived(attempt.secret.encode(), "launchers")


def _publish(attempt: Attempt, **of_this_node: int) -> None:
    """Write this launcher's address, the variables of its node, the names of those that its startup hook has changed,
    and `of_this_node` to its file.
    """
    variables = {name: os.environ[name] for name in _OF_A_NODE if name in os.environ}
    hook = changed_names(attempt.socket)
    content = {"host": attempt.address, "environment": variables, "hook": hook, **of_this_node}
    write_json(attempt.trial.launcher(attempt.number, attempt.node_rank), content, private=True)


def _read(path: Path) -> dict[str, Any]:
    """Wait for a launcher's file and return its content. Raises HpcDetError after WAIT_S."""
    content: dict[str, Any] | None = awaited(path, WAIT_S)
    if content is None:
        raise HpcDetError(
            f"{path}: the node's launcher published no address within {WAIT_S:.0f} s; check that it runs there"
        )
    return content


# --- mpirun's remote shell


def host_name(node: int) -> str:
    """Return the name of a node for mpirun: localhost for node 0, else an address that is not looked up."""
    return str(_FIRST + node) if node else "localhost"


def node_of(host: str) -> int:
    """Return the number of the node with this `host_name`."""
    return int(ipaddress.IPv4Address(host)) - int(_FIRST)


def main(argv: list[str]) -> int:
    host, *command = [word for word in argv[:1] if word != "-x"] + argv[1:]
    try:
        return run_on(Attempt.from_env(os.environ), node_of(host), " ".join(command))
    except (HpcDetError, OSError) as error:
        print(f"hpc-det: node {host}: {error}", file=sys.stderr, flush=True)
        return CONNECTION_LOST


if __name__ == "__main__":
    block_stop_signals()  # mpirun starts this process with default handlers
    sys.exit(main(sys.argv[1:]))
