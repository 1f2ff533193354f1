"""How the launchers of a gang's nodes work together, where one of them leads: the one on node 0.

It alone starts mpirun or srun. The others wait: they start on their node what mpirun wants there, so that ranks are
descendants of their own node's agent, and neither ssh nor the scheduler is needed. At last they hear from node 0 which
exit code the gang has, and end with it.

Each publishes where it listens in a file beside the rendezvous. A request is answered for the attempt's secret alone,
which is never sent: the asking side proves with an HMAC over a fresh nonce that it knows it (RFC 2104).
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.attempt import Attempt
from hpc_det.launch.failure import failure_now, note_failure
from hpc_det.node.rendezvous import WAIT_S
from hpc_det.process import exit_code
from hpc_det.store.files import read_json, write_json

CONNECTION_LOST = 255
"""As ssh(1) says it."""
_LONGEST_REQUEST = 1 << 20
_ASKER_MUST_SPEAK_S = 10.0
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
        return Host(attempt).serve()
    _publish(attempt)
    code = _lead(attempt, command)
    _publish(attempt, ended=code)  # for launchers that come to listen only now
    for node in range(1, attempt.nodes):
        with suppress(OSError):
            if at := read_json(attempt.trial.launcher(attempt.number, node)):
                _ask(at, attempt.secret, {"end": code}).close()
    return code


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
    with _ask(_read(attempt.trial.launcher(attempt.number, node)), attempt.secret, {"run": command}) as connection:
        answer = connection.makefile("rb").readline()
    return int(json.loads(answer)["code"]) if answer else CONNECTION_LOST


def environment_of(attempt: Attempt, node: int) -> dict[str, str]:
    """What differs on each node, for a rank that the scheduler started with the environment of node 0."""
    told: dict[str, str] = _read(attempt.trial.launcher(attempt.number, node))["environment"]
    return told


class Host(socketserver.ThreadingTCPServer):
    """Of a node that does not lead."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, attempt: Attempt) -> None:
        super().__init__((attempt.address, 0), _Guest)
        self.secret = attempt.secret
        self.children: list[subprocess.Popen[bytes]] = []
        self._attempt = attempt
        self._code = 0

    def serve(self) -> int:
        """Until node 0 says how the gang ended."""
        _publish(self._attempt, port=self.server_address[1])
        leading = read_json(self._attempt.trial.launcher(self._attempt.number, 0))
        if leading and "ended" in leading:
            self.server_close()
            return int(leading["ended"])
        with self:
            self.serve_forever(poll_interval=0.05)
        end = time.monotonic() + _CHILDREN_LEAVE_S
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, end - time.monotonic()))
        return self._code

    def end(self, code: int) -> None:
        self._code = code
        self.shutdown()


class _Guest(socketserver.StreamRequestHandler):
    """One connection, in a thread of its own."""

    server: Host
    timeout = _ASKER_MUST_SPEAK_S

    def handle(self) -> None:
        with suppress(OSError, ValueError):  # whoever else may speak to this port
            nonce = secrets.token_hex(16)
            self._send({"nonce": nonce})
            message = json.loads(self.rfile.readline(_LONGEST_REQUEST))
            request = message["request"]
            if not hmac.compare_digest(message["proof"], _proof(self.server.secret, nonce, request)):
                return
            if "end" in request:
                self.server.end(request["end"])
            else:
                self._run(request["run"])

    def _run(self, command: str) -> None:
        child = subprocess.Popen(["/bin/bash", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True)
        self.server.children.append(child)
        threading.Thread(target=self._report, args=[child], daemon=True).start()
        self.connection.settimeout(None)
        self.rfile.read(1)  # until the other end lets go, or the child has ended
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        verdict = threading.Timer(_VERDICT_S, self.server.end, [1])
        verdict.daemon = True
        verdict.start()

    def _report(self, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        with suppress(OSError):
            self._send({"code": exit_code(code)})
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, message: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(message).encode() + b"\n")


def _ask(at: dict[str, Any], secret: str, request: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection((at["host"], at["port"]), timeout=_ASKER_MUST_SPEAK_S)
    greeting = connection.makefile("rb").readline()
    if not greeting:
        connection.close()
        raise ConnectionResetError(f"{at['host']}:{at['port']}: the launcher there has ended")
    nonce = json.loads(greeting)["nonce"]
    message = {"request": request, "proof": _proof(secret, nonce, request)}
    connection.sendall(json.dumps(message).encode() + b"\n")
    connection.settimeout(None)
    return connection


def _proof(secret: str, nonce: str, request: dict[str, Any]) -> str:
    return hmac.new(secret.encode(), f"{nonce} {json.dumps(request, sort_keys=True)}".encode(), "sha256").hexdigest()


def _publish(attempt: Attempt, **of_this_node: int) -> None:
    told = {name: os.environ[name] for name in _OF_A_NODE if name in os.environ}
    where = {"host": attempt.address, "environment": told, **of_this_node}
    write_json(attempt.trial.launcher(attempt.number, attempt.node_rank), where, private=True)


def _read(path: Path) -> dict[str, Any]:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        with suppress(FileNotFoundError):
            os.listdir(path.parent)  # NFS believes for up to a minute that a name is not there; a listing refreshes it
        told: dict[str, Any] | None = read_json(path)
        if told is not None:
            return told
        time.sleep(0.05)
    raise HpcDetError(f"{path}: the launcher of this node published nothing in {WAIT_S:.0f} s; does it run there?")
