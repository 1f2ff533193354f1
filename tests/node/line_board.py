"""A line server and honest clients, over loopback."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.lines import Line, connect
from tests.wait import DEADLINE_S

KEY = bytes(range(32))
GENERATION = 2


def key_for(identity: dict[str, Any]) -> bytes | None:
    """Return a client's key as a driver does: agents hold the run's key, ranks the key of their generation."""
    return KEY if identity["role"] == "agent" else derived(KEY, f"generation {identity['generation']}")


def open_files() -> set[str]:
    """Return the open descriptors of this process and what they lead to, such as "7 socket:[4711]"."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of listdir
            found.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
    return found


class Board:
    """A server that echoes messages with {"do": "echo"} in its own thread."""

    def __init__(self, key_for: Callable[[dict[str, Any]], bytes | None] = key_for) -> None:
        self._open_files = open_files()
        self.server = TcpLineServer("127.0.0.1", key_for, lambda address: True)
        self.server.answers["echo"] = lambda line, message: line.send(message.head, message.body)
        self._clients: list[Line] = []

    @property
    def address(self) -> tuple[str, int]:
        return self.server.host, self.server.port

    def event(self) -> Event:
        return self.server.events.get(timeout=DEADLINE_S)

    def client(self, rank: int = 0) -> Line:
        """Return a rank's end of a new line."""
        identity = {"role": "rank", "rank": rank, "generation": GENERATION}
        line = connect(*self.address, derived(KEY, f"generation {GENERATION}"), identity, DEADLINE_S)
        self._clients.append(line)
        return line

    def line(self, rank: int = 0) -> tuple[Line, Line]:
        """Return the driver's end and the rank's end of a new line."""
        client = self.client(rank)
        event = self.event()
        assert event.kind == "arrived"
        return event.line, client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        assert "lines" not in [thread.name for thread in threading.enumerate()]
        assert not open_files() - self._open_files


def echoed(client: Line, head: dict[str, Any], body: bytes = b"") -> None:
    """Send a message, and fail unless it comes back unchanged."""
    client.send({"do": "echo", **head}, body)
    message = client.receive()
    assert message is not None, "the line is down"
    assert message == ({"do": "echo", **head}, body)
