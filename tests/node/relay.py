"""A man in the middle, which records and may change every byte between a client and its server."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

Tamper = Callable[[str, int, bytes], bytes]
"""(direction, offset in its stream, received bytes) -> bytes to forward; direction is "to listener" or "to client".

If it returns fewer bytes than were received, the relay cuts the line.
"""


def listen_only(direction: str, offset: int, data: bytes) -> bytes:
    return data


class Relay:
    """Relays one connection."""

    def __init__(self, listener: tuple[str, int], tamper: Tamper, port: int) -> None:
        self.recorded = {"to listener": b"", "to client": b""}
        self._tamper = tamper
        self._server = socket.create_server(("127.0.0.1", port))
        self.host, self.port = self._server.getsockname()
        self._thread = threading.Thread(target=self._run, args=(listener,))
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _run(self, listener: tuple[str, int]) -> None:
        with suppress(OSError), self._server.accept()[0] as client:
            self._server.close()  # a second call is refused
            with socket.create_connection(listener) as upstream, selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ, ("to listener", client, upstream))
                selector.register(upstream, selectors.EVENT_READ, ("to client", upstream, client))
                while all(self._carry(*key.data) for key, _ in selector.select()):
                    pass

    def _carry(self, direction: str, source: socket.socket, target: socket.socket) -> bool:
        data = source.recv(4096)
        forwarded = self._tamper(direction, len(self.recorded[direction]), data)
        self.recorded[direction] += data
        target.sendall(forwarded)
        return len(forwarded) >= len(data) > 0


def cut(direction: str, position: int) -> Tamper:
    return lambda here, offset, data: data if here != direction else data[: max(position - offset, 0)]


@contextmanager
def relay(listener: tuple[str, int], tamper: Tamper = listen_only, port: int = 0) -> Iterator[Relay]:
    running = Relay(listener, tamper, port)
    try:
        yield running
    finally:
        running.close()
