"""Lines between the processes of a run: connections over TCP or a Unix socket that carry frames.

This is the client's end, and what both ends share. The listener's end is a server of lines: of a driver, of rank 0, of
node 0's agent, of a node's launcher, of a node's agent for its ranks.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpc_det.errors import HpcDetError
from hpc_det.node.frames import (
    HELLO,
    LONGEST_IDENTITY,
    MAC_BYTES,
    NONCE_BYTES,
    BrokenRule,
    Feed,
    Handshake,
    Message,
    Seals,
    Unsealed,
    message,
)
from hpc_det.node.key import derived
from hpc_det.node.network import LONGEST_TRY_S, tries

if TYPE_CHECKING:
    from hpc_det.node.frames import Bytes, Reading

__all__ = ["Line", "Message", "connect", "derived"]

READ_BYTES = 2**18
"""At once: a long body must not keep its reader from other lines."""
_ONE_PACKET = 2**16
"""A body up to here is rather copied than sent by a call of its own."""
GONE_S = 60
"""A host that answers nothing is given up then. That a process has ended is seen at once."""
PROBE_S = 1
"""A silent host is asked so often whether it is there: one answer between two outages keeps them from counting as one.
Its kernel answers, also for a process that is suspended or busy.
"""


class NoLine(HpcDetError):
    """The listener could not be reached."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.error = error
        """Of the last try."""


class Line:
    """One end of a connection between two who hold the same key, or are processes of one user on one node."""

    identity: dict[str, Any]
    """What the client said of itself when it showed the key; over a Unix socket what the kernel says of it."""
    seals: Seals
    """Of what is sent."""
    feed: Feed
    """Of what is received."""

    def __init__(self, connection: socket.socket, buffer: memoryview) -> None:
        self.connection = connection
        self.heard_at = time.monotonic()
        """When something came from the other end last, be it a part of a message."""
        self.received: deque[Message] = deque()
        self.error: OSError | None = None
        """Why the line ended, where the other end did not close it: after TimeoutError its host is gone."""
        self._buffer = buffer
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def send(self, head: dict[str, Any], body: Bytes = b"") -> None:
        """By any thread. Nothing is raised when the other end is gone: the reader sees that.

        The head is JSON, of 1 MiB at most (ValueError). A body is not copied: leave it as it is.
        """
        self._put(Unsealed(head, body))

    def _put(self, unsealed: Unsealed) -> None:
        with self._sending:
            opening = unsealed.opening(self.seals)
            if len(unsealed.body) <= _ONE_PACKET:
                self._write(opening + unsealed.body)
            else:
                self._write(opening)
                self._write(unsealed.body)

    def receive(self) -> Message | None:
        """The next message, waiting for it; None at the end of the line. At the client's end only."""
        with self._receiving:
            while not self.received:
                if not self.take():
                    return None
            return self.received.popleft()

    def receive_some(self) -> list[Message] | None:
        """The messages that have come, waiting for a part of one; None at the end of the line. For whoever waits for
        several connections at once. At the client's end only.
        """
        with self._receiving:
            if not self.take():
                return None
            return [self.received.popleft() for _ in range(len(self.received))]

    def take(self) -> bool:
        """Read what has come; whether the line still stands."""
        try:
            size = self.connection.recv_into(self._buffer)
            self.feed.take(self._buffer[:size])
        except BlockingIOError:
            return True
        except OSError as error:
            self.error = error
            return False
        except BrokenRule:
            return False
        self.heard_at = time.monotonic()
        return size > 0

    def close(self) -> None:
        """Whoever waits in `send` or `receive` is woken."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            self.connection.close()

    def _write(self, data: Bytes) -> None:
        with suppress(OSError):
            self.connection.sendall(data)


def connect(
    host: str,
    port: int,
    key: bytes,
    identity: dict[str, Any],
    within_s: float,
    *,
    listener: str = "the listener",
    gone_s: float = GONE_S,
    awaits_listener: bool = True,
) -> Line:
    """The client's end. `identity`: at most 1 KiB of JSON. `listener`: who that is, for errors. `gone_s`: a silent host
    is given up then. `awaits_listener`: whether the listener may still have to begin, so that a refused connection is
    tried again.

    Tries again until `within_s` is over: a listener on whom strangers call may have to hang up on anyone. Raises
    NoLine where nobody listens and where it hangs up each time, and HpcDetError at once where it does not hold the key.
    """
    for left_s in tries(within_s):
        end = time.monotonic() + min(left_s, LONGEST_TRY_S)
        try:
            return _introduced(host, port, key, identity, end, gone_s, listener)
        except OSError as error:
            last = error
            if isinstance(error, ConnectionRefusedError) and not awaits_listener:
                break
    raise NoLine(
        f"{host}:{port}: no connection to {listener} within {within_s:g} s: {last.strerror or last}. Does {listener} "
        f"still run, can this node reach it, and does this {identity.get('role', 'process')} still belong to it?",
        last,
    )


def _introduced(
    host: str, port: int, key: bytes, identity: dict[str, Any], end: float, gone_s: float, listener: str
) -> Line:
    connection = socket.create_connection((host, port), _left(end))
    try:
        set_up(connection, gone_s)
        handshake = _shake_hands(connection, key, identity, end, listener)
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return _line(connection, identity, Seals(handshake.to_listener), Seals(handshake.to_client))


def connect_local(path: str) -> Line:
    """The client's end of a line over the Unix socket `path`. Raises OSError where nobody listens."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return line_over(connection)


def line_over(connection: socket.socket) -> Line:
    """One end of a connection to a process of this user on this node; nobody shows a key."""
    return _line(connection, {}, Seals(None), Seals(None))


def _line(connection: socket.socket, identity: dict[str, Any], sent: Seals, received: Seals) -> Line:
    line = Line(connection, memoryview(bytearray(READ_BYTES)))
    line.identity, line.seals = identity, sent
    line.feed = Feed(_put_into(line.received, received))
    return line


def _shake_hands(
    connection: socket.socket, key: bytes, identity: dict[str, Any], end: float, listener: str
) -> Handshake:
    said = json.dumps(identity).encode()
    if len(said) > LONGEST_IDENTITY:
        raise ValueError(f"an identity of {len(said)} bytes; {LONGEST_IDENTITY} at most")
    listener_nonce = _exactly(connection, NONCE_BYTES, end)
    handshake = Handshake(key, listener_nonce, secrets.token_bytes(NONCE_BYTES), said)
    connection.sendall(HELLO.pack(handshake.client_nonce, handshake.client_proof, len(said)) + said)
    if not hmac.compare_digest(_exactly(connection, MAC_BYTES, end), handshake.listener_proof):
        host, port, *_ = connection.getpeername()
        raise HpcDetError(f"{host}:{port}: who listens there does not hold the key of this run, and is not {listener}")
    return handshake


def _put_into(received: deque[Message], seals: Seals) -> Reading:
    while True:
        received.append((yield from message(seals)))


def _exactly(connection: socket.socket, size: int, end: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(_left(end))
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionError("the listener hangs up")
        received += piece
    return received


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def set_up(connection: socket.socket, gone_s: float = GONE_S) -> None:
    """Small messages leave at once, and a host that has gone silent is noticed after `gone_s` seconds (tcp(7))."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, PROBE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_USER_TIMEOUT, int(1000 * gone_s)),  # the end of the probes, too, whatever TCP_KEEPCNT is
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
