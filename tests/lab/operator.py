"""What only root may do to the lab, done for tests that run as an ordinary user (tests.lab.as_user).

A request is a line, the command as JSON; the answer is one, too: [exit code, stdout, stderr].
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
"""Names the operator's socket."""
COMMANDS = ("scontrol", "ip", "kill", "slurm-up")


def is_for_operators(command: Sequence[str | Path]) -> bool:
    """Whether Slurm or Linux would refuse it to an ordinary user."""
    name, *arguments = map(str, command)
    if Path(name).name == "scontrol":
        return arguments[0] in ("suspend", "resume") or any(word.startswith("NodeName=") for word in arguments)
    return Path(name).name in COMMANDS


def asked(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    """The command as the operator's. Needs VARIABLE."""
    with socket(AF_UNIX) as line:
        line.connect(os.environ[VARIABLE])
        line.sendall(json.dumps([*map(str, command)]).encode() + b"\n")
        with line.makefile() as answer:
            code, out, err = json.loads(answer.readline())
    return subprocess.CompletedProcess([*map(str, command)], code, out, err)


@contextmanager
def serving(path: Path, user: int, env: Mapping[str, str]) -> Iterator[None]:
    """At a socket that `user` alone may use; commands run in `env`."""

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
        yield
        server.shutdown()
        thread.join()
    path.unlink()
