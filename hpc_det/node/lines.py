"""Connections between the processes of a run, over TCP or a Unix socket, which carry framed messages.

hpc_det.node.frames defines the frames. This module has the client's end and what both ends share. The listeners are
servers (hpc_det.node.line_server) of a driver, of rank 0, of node 0's agent, of a node's launcher, and of a node's
agent for its ranks.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
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
from hpc_det.node.process import uninterrupted

if TYPE_CHECKING:
    from hpc_det.node.frames import Bytes, Reading

__all__ = ["Line", "Message", "connect", "derived"]

READ_BYTES = 2**18
"""Most bytes that one call reads, so that a long body does not keep its reader from other connections."""
_ONE_PACKET = 2**16
"""Bytes up to which a body is copied behind its head, because a second system call costs more."""
GONE_S = 60
"""Seconds without any answer after which a host is lost. The exit of a process is noticed at once."""
PROBE_S = 1
"""Seconds between the kernel's probes of a silent host.

With probes this frequent, an answer arrives even in a short gap between two network outages, so that they do not count
as one long outage. The other host's kernel answers even for a process that is suspended or busy.
"""


class NoLine(HpcDetError):
    """The listener could not be reached."""

    def __init__(self, message: str, error: OSError) -> None:
        super().__init__(message)
        self.error = error
        """The error of the last try."""


class Line:
    """One end of a connection between two processes that hold the same key, or that one user runs on one node."""

    identity: dict[str, Any]
    """The identity that the client sent with its proof; over a Unix socket, the client's process id from the kernel."""
    seals: Seals
    """The seals of the messages sent."""
    feed: Feed
    """The parser of the bytes received."""

    def __init__(self, connection: socket.socket, buffer: memoryview) -> None:
        self.connection = connection
        self.heard_at = time.monotonic()
        """Monotonic time at which bytes from the other end last arrived."""
        self.received: deque[Message] = deque()
        self.error: OSError | None = None
        """The error that ended the connection, TimeoutError if its host is lost; None if an end closed it or sent
        invalid bytes.
        """
        self._buffer = buffer
        self._sending, self._receiving = threading.Lock(), threading.Lock()

    def send(self, head: dict[str, Any], body: Bytes = b"") -> None:
        """Send a message, from any thread. Raises nothing if the connection has ended: the reader notices that.

        `head` is a JSON object of at most 1 MiB (ValueError). `body` is not copied, so it must not change until it is
        sent.
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
        """Wait for the next message and return it, or None at the end of the connection. For the client's end only."""
        with self._receiving:
            while not self.received:
                if not self.take():
                    return None
            return self.received.popleft()

    def receive_some(self) -> list[Message] | None:
        """Wait for bytes; return the messages that they complete, possibly none, or None at the end of the connection.

        For a client that waits for several connections at once.
        """
        with self._receiving:
            if not self.take():
                return None
            return [self.received.popleft() for _ in range(len(self.received))]

    def take(self) -> bool:
        """Read what has arrived; return False if the connection has ended."""
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
        """Close the connection. Threads that wait in `send` or `receive` return."""
        with suppress(OSError):
            # Ends the waiting of threads in `send` and `receive`, which hold the locks below.
            self.connection.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:
            self.connection.close()

    def _write(self, data: Bytes) -> None:
        with suppress(OSError):
            self.connection.sendall(data)


@uninterrupted()
def send_to(lines: Iterable[Line], head: dict[str, Any], body: Bytes = b"") -> None:
    """Send one message to several connections of a server, as `Line.send` does, but encode it only once."""
    # For thousands of connections this, and one change of the handler of Ctrl-C, halve the time or better.
    unsealed = Unsealed(head, body)
    for line in lines:
        line._put(unsealed)


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
    """Connect to a listener and prove the key; return the connection.

    `identity`: at most 1 KiB of JSON. `within_s`: seconds for all tries. `listener`: its name in errors. `gone_s`:
    seconds without an answer after which the host is lost. `awaits_listener`: whether the listener may not have started
    yet, so that a refused connection is retried.

    Raises NoLine if no try succeeds, and HpcDetError at once if the listener does not hold the key.
    """
    # A listener with too many strangers closes the oldest connections, which may hit this one: hence several tries.
    for left_s in tries(within_s):
        end = time.monotonic() + min(left_s, LONGEST_TRY_S)
        try:
            return _introduced(host, port, key, identity, end, gone_s, listener)
        except OSError as error:
            last = error
            if isinstance(error, ConnectionRefusedError) and not awaits_listener:
                break
    raise NoLine(
        f"{host}:{port}: no connection to {listener} within {within_s:g} s: {last.strerror or last}. Check that "
        f"{listener} still runs, that this node can reach it, and that this {identity.get('role', 'process')} still "
        f"belongs to it",
        last,
    )


def _introduced(
    host: str, port: int, key: bytes, identity: dict[str, Any], end: float, gone_s: float, listener: str
) -> Line:
    connection = socket.create_connection((host, port), _left(end))
    try:
        set_up(connection, gone_s)
        handshake = _shake_hands(connection, key, identity, end, listener)
        # From here on TCP_USER_TIMEOUT alone decides when the host is lost.
        connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return _line(connection, identity, Seals(handshake.to_listener), Seals(handshake.to_client))


def connect_local(path: str) -> Line:
    """Return a connection to the Unix socket `path`. Raises OSError if no process listens there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return line_over(connection)


def line_over(connection: socket.socket) -> Line:
    """Return this end of a connection to a process of this user on this node; no key is exchanged."""
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
        raise ValueError(f"identity: {len(said)} bytes, but at most {LONGEST_IDENTITY} are allowed")
    listener_nonce = _exactly(connection, NONCE_BYTES, end)
    handshake = Handshake(key, listener_nonce, secrets.token_bytes(NONCE_BYTES), said)
    connection.sendall(HELLO.pack(handshake.client_nonce, handshake.client_proof, len(said)) + said)
    if not hmac.compare_digest(_exactly(connection, MAC_BYTES, end), handshake.listener_proof):
        host, port, *_ = connection.getpeername()
        raise HpcDetError(
            f"{host}:{port}: the process that listens there does not hold the key of this run, so it is not {listener}"
        )
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
            raise ConnectionError("the listener closed the connection")
        received += piece
    return received


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.001)


def set_up(connection: socket.socket, gone_s: float = GONE_S) -> None:
    """Send small messages at once; end the connection after `gone_s` seconds without an answer from the host
    (tcp(7)).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, PROBE_S),
        (socket.TCP_KEEPINTVL, PROBE_S),
        (socket.TCP_USER_TIMEOUT, int(1000 * gone_s)),  # also ends the probes, whatever TCP_KEEPCNT is
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
