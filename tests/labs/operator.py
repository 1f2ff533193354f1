"""A server that runs commands as root for tests of an ordinary user (tests.labs.as_user).

A request is one line, the command as a JSON list; the answer is one line, too: [exit code, stdout, stderr].
"""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from socket import AF_UNIX, socket

VARIABLE = "HPC_DET_LAB_OPERATOR"
"""The environment variable with the path of the operator's socket."""
COMMANDS = ("scontrol", "sacctmgr", "ip", "kill", "slurm-up")


def needs_root(command: Sequence[str | Path]) -> bool:
    """Return whether Slurm or Linux refuses the command to an ordinary user."""
    name, *arguments = map(str, command)
    if Path(name).name == "scontrol":
        return arguments[0] in ("suspend", "resume") or any(word.startswith("NodeName=") for word in arguments)
    return Path(name).name in COMMANDS


def run_by_operator(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """Let the operator at the socket in VARIABLE run the command as root."""
    with socket(AF_UNIX) as line:
        line.connect(os.environ[VARIABLE])
        line.sendall(json.dumps([*map(str, command)]).encode() + b"\n")
        with line.makefile() as answer:
            code, out, err = json.loads(answer.readline())
    return subprocess.CompletedProcess([*map(str, command)], code, out, err)


@contextmanager
def serving(path: Path, user: int, env: Mapping[str, str]) -> Iterator[None]:
    """Serve at the socket `path`, which only `user` may use; commands get the environment `env`."""

    class Request(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            command = json.loads(self.rfile.readline())
            assert Path(command[0]).name in COMMANDS, command
            done = subprocess.run(command, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            self.wfile.write(json.dumps([done.returncode, done.stdout, done.stderr]).encode() + b"\n")

    path.unlink(missing_ok=True)
    with socketserver.ThreadingUnixStreamServer(str(path), Request) as server:
        os.chown(path, user, -1)
        path.chmod(0o600)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            path.unlink()
