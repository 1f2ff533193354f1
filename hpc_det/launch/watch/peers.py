"""The lines between the node agents of a gang: each of the others holds one to node 0's, over TCP, O(nodes) in all.

An agent that comes says {"token": ..., "node": RANK, ...} first; what else they say to each other is the business of
hpc_det.launch.watch.vigil.
"""

from __future__ import annotations

import hashlib
import hmac
import selectors
import socket
from collections.abc import Callable
from typing import Any

from hpc_det.launch.doorbell import Line
from hpc_det.node.rendezvous import Rendezvous, free_port

Heard = Callable[[int, dict[str, Any]], None]
"""What is called with the node's rank and its message."""
SEND_S = 5.0
"""How long a message may take before its line is given up."""


def token(secret: str) -> str:
    """Shows that an agent belongs to the gang. It crosses the network, where the secret itself never may."""
    return hashlib.sha256(f"agents/{secret}".encode()).hexdigest()


class Peers:
    """Node 0's end: the other nodes, by rank."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.on_heard: Heard = lambda node, message: None
        self.secret = ""
        """Of the rendezvous; until it is published nobody can know where to come."""
        self._selector = selector
        self._lines: dict[int, Line] = {}
        self._strangers: set[Line] = set()
        self._server = socket.create_server(("", free_port()), backlog=4096)
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def tell(self, message: dict[str, Any], node: int | None = None) -> None:
        """To one node, or to all."""
        for line in [self._lines[node]] if node is not None else self._lines.values():
            line.send(message)

    def close(self) -> None:
        for line in (*self._lines.values(), *self._strangers):
            self._hang_up(line)
        self._selector.unregister(self._server)
        self._server.close()

    def _accept(self) -> None:
        line = Line(_kept_alive(self._server.accept()[0]))
        self._strangers.add(line)
        self._selector.register(line.connection, selectors.EVENT_READ, lambda: self._meet(line))

    def _meet(self, line: Line) -> None:
        """Anybody on the network may connect: whoever cannot show the token is hung up on."""
        messages = _received(line)
        if messages == []:
            return
        self._strangers.discard(line)
        first = messages[0] if messages else {}
        if not hmac.compare_digest(str(first.get("token")).encode(), token(self.secret).encode()):
            self._hang_up(line)
            return
        node = int(first["node"])
        self._lines[node] = line
        self._selector.modify(line.connection, selectors.EVENT_READ, lambda: self._listen(node, line))
        for message in messages or []:
            self.on_heard(node, message)

    def _listen(self, node: int, line: Line) -> None:
        messages = _received(line)
        if messages is None:  # why it is gone is the business of whoever started it
            self._lines.pop(node, None)
            self._hang_up(line)
        for message in messages or []:
            self.on_heard(node, message)

    def _hang_up(self, line: Line) -> None:
        self._selector.unregister(line.connection)
        line.connection.close()


class ToNode0:
    """Another node's end."""

    def __init__(
        self, selector: selectors.BaseSelector, meeting: Rendezvous, hello: dict[str, Any], within_s: float
    ) -> None:
        """Raises OSError where node 0 cannot be reached in time."""
        self.on_heard: Heard = lambda node, message: None
        self._selector = selector
        self._line = Line(_kept_alive(socket.create_connection((meeting.host, meeting.agents_port), within_s)))
        selector.register(self._line.connection, selectors.EVENT_READ, self._listen)
        self._is_open = True
        self.tell({"token": token(meeting.secret), **hello})

    def tell(self, message: dict[str, Any]) -> None:
        self._line.send(message)

    def answered(self) -> bool:
        """Wait for a message; whether there was one, within `SEND_S`."""
        return bool(_received(self._line))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._selector.unregister(self._line.connection)
            self._line.connection.close()

    def _listen(self) -> None:
        messages = _received(self._line)
        if messages is None:
            self.close()
        for message in messages or []:
            self.on_heard(0, message)


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Firewalls forget silent connections."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    connection.settimeout(SEND_S)
    return connection


def _received(line: Line) -> list[dict[str, Any]] | None:
    """None at the end of the line, and for anything that is no message."""
    try:
        messages = line.receive()
    except ValueError:
        return None
    return None if messages is not None and not all(isinstance(found, dict) for found in messages) else messages
