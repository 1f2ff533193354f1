"""Connect a command to the server or the moms: one JSON object per line over a Unix socket, both ways."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any


class ServerDown(Exception):
    """Nothing listens on the socket."""


class Connection:
    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        try:
            self.socket.connect(str(path))
        except OSError:
            self.socket.close()
            raise ServerDown from None
        self._lines = self.socket.makefile("r", encoding="utf-8")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self.socket.close()

    def send(self, **request: Any) -> None:
        self.socket.sendall(json.dumps(request).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises `ServerDown` if the other side has closed the connection."""
        line = self._lines.readline()
        if not line:
            raise ServerDown
        answer: dict[str, Any] = json.loads(line)
        return answer


def ask(path: Path, **request: Any) -> dict[str, Any]:
    with Connection(path) as connection:
        connection.send(**request)
        return connection.receive()
