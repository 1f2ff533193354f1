"""A server for the connections of other processes (hpc_det.node.lines). It never waits for any of them.

Over TCP, callers that have not proved yet that they hold the key are strangers. Their number and their time are
limited, the oldest is closed first, and nothing that they send is trusted. A caller with a wrong proof is disconnected
without an error message.
"""

from __future__ import annotations

import hmac
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpc_det.errors import HpcDetError
from hpc_det.node.frames import (
    HELLO,
    LONGEST_IDENTITY,
    NONCE_BYTES,
    BrokenRule,
    Feed,
    Handshake,
    Message,
    Seals,
    Unsealed,
    exactly,
    message,
    parsed,
)
from hpc_det.node.lines import GONE_S, READ_BYTES, Line, set_up
from hpc_det.node.network import NO_MORE_FILES
from hpc_det.node.process import uninterrupted

if TYPE_CHECKING:
    from hpc_det.node.frames import Bytes, Reading

STRANGERS = 64
"""Connections at a time that have not proved the key yet; with one more, the oldest is closed."""
PATIENCE_S = 5.0
"""Seconds after which a connection that has not proved the key is closed."""
REST_S = 0.5
"""Seconds without accepting connections when this process cannot open more files; they wait in the kernel's queue."""
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Event(NamedTuple):
    """A change of one connection: it was authenticated, sent a message, or ended."""

    kind: Literal["arrived", "said", "gone"]
    line: Line
    message: Message | None
    """The message received, for "said"; otherwise None."""


class LineServer:
    """Serves the connections of one listening socket.

    Events go to the queue `events`, or to `on_event`, which the server's thread calls. Without a thread, the owner
    calls `turn` whenever `fileno` is readable, and at least once a second.
    """

    def __init__(
        self, server: socket.socket, on_event: Callable[[Event], None] | None = None, *, has_thread: bool = True
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._emit = on_event or self.events.put
        self.answers: dict[str, Callable[[Line, Message], None]] = {}
        """Functions that handle messages whose head has the key "do", keyed by its value.

        The server's thread calls them, and such messages cause no events.
        """
        self._server = server
        self._server.setblocking(False)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._strangers: dict[_Caller, float] = {}
        """Connections that have not proved the key yet, oldest first, and the monotonic time when each is closed."""
        self._lines: set[_Caller] = set()
        self._rests_until: float | None = None
        """Monotonic time until which no connection is accepted; None if connections are accepted."""
        self._unsent: deque[_Caller] = deque()
        """Connections with data that the network did not take at once."""
        # Wakes the selector when a thread has queued data that could not be sent at once, or has called `close`.
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._server, _READ, self._accept)
        self._selector.register(self._bell, _READ, self._answer_bell)
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="lines", daemon=True) if has_thread else None
        if self._thread:
            self._thread.start()

    def fileno(self) -> int:
        return self._selector.fileno()

    def _admits(self, connection: socket.socket, address: Any) -> bool:
        """Return whether to accept a connection from `address` at all."""
        raise NotImplementedError

    def _introduction(self, caller: _Caller) -> Generator[int, Bytes, Seals]:
        """Authenticate the caller, set its `identity` and `seals`, and return the Seals of its messages. Raises
        BrokenRule.
        """
        raise NotImplementedError

    def turn(self) -> None:
        """Handle everything that is due, without waiting."""
        self._patience()
        for key, ready in self._selector.select(0):
            key.data(ready)

    def close(self) -> None:
        """Close every connection; data that was not sent yet is lost."""
        if self._is_open:
            self._is_open = False
            if self._thread:
                os.eventfd_write(self._bell, 1)
                self._thread.join()
            else:
                self._end()
            os.close(self._bell)

    def let_go(self) -> None:
        """Close this process's copies of the connections after a fork; those of the parent stay open."""
        if self._is_open:  # after `close` the bell's descriptor number may belong to another file
            self._is_open = False
            for caller in (*self._strangers, *self._lines):
                caller.connection.close()
            self._server.close()
            self._selector.close()
            os.close(self._bell)

    def _serve(self) -> None:
        try:
            while self._is_open:
                for key, ready in self._selector.select(self._patience()):
                    key.data(ready)
        finally:
            self._end()

    def _end(self) -> None:
        self._server.close()
        for caller in [*self._strangers, *self._lines]:
            self._hang_up(caller)
        self._selector.close()

    def _patience(self) -> float | None:
        """Close overdue strangers and end an overdue rest; return the seconds until the next one is due, or None."""
        now = time.monotonic()
        if self._rests_until is not None and self._rests_until <= now:
            self._rests_until = None
            self._selector.register(self._server, _READ, self._accept)
        rest = [] if self._rests_until is None else [self._rests_until - now]
        for caller, end in list(self._strangers.items()):
            if end > now:
                return min([end - now, *rest])
            self._hang_up(caller)
        return min(rest, default=None)

    def _accept(self, ready: int) -> None:
        try:
            connection, address = self._server.accept()
        except OSError as error:
            if error.errno in NO_MORE_FILES:  # the selector would report the same connection again at once
                self._selector.unregister(self._server)
                self._rests_until = time.monotonic() + REST_S
            return  # any other error: the caller has already disconnected
        if not self._admits(connection, address):
            connection.close()
            return
        connection.setblocking(False)
        if len(self._strangers) == STRANGERS:
            self._hang_up(next(iter(self._strangers)))
        caller = _Caller(connection, self._buffer, self._send_later)
        self._strangers[caller] = time.monotonic() + PATIENCE_S
        self._selector.register(connection, _READ, lambda ready: self._attend(caller, ready))
        caller.feed = Feed(self._conversation(caller))

    def _conversation(self, caller: _Caller) -> Reading:
        seals = yield from self._introduction(caller)
        del self._strangers[caller]
        self._lines.add(caller)
        self._emit(Event("arrived", caller, None))
        while True:
            self._deliver(caller, (yield from message(seals)))

    def _deliver(self, caller: _Caller, said: Message) -> None:
        do = said.head.get("do")
        answer = self.answers.get(do) if isinstance(do, str) else None
        if answer is None:
            self._emit(Event("said", caller, said))
            return
        try:
            answer(caller, said)
        except Exception:  # closes this connection only
            import logging  # takes 4 ms of the start of each job

            logging.getLogger(__name__).exception(
                "answering %r of %s failed; its connection is closed", do, caller.identity
            )
            raise BrokenRule from None

    def _attend(self, caller: _Caller, ready: int) -> None:
        if caller.is_dropped:  # since select, in favour of a newer stranger
            return
        if ready & _WRITE and caller.push():
            self._selector.modify(caller.connection, _READ, self._selector.get_key(caller.connection).data)
        if ready & _READ and not caller.take():
            self._hang_up(caller)

    def _hang_up(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        caller.drop()
        if self._strangers.pop(caller, None) is None:
            self._lines.remove(caller)
            self._emit(Event("gone", caller, None))

    def _send_later(self, caller: _Caller) -> None:
        self._unsent.append(caller)
        os.eventfd_write(self._bell, 1)

    def _answer_bell(self, ready: int) -> None:
        os.eventfd_read(self._bell)
        while self._unsent:
            caller = self._unsent.popleft()
            if caller in self._lines:
                self._selector.modify(caller.connection, _READ | _WRITE, self._selector.get_key(caller.connection).data)


class TcpLineServer(LineServer):
    """Listens at a free port of the address `host`. Raises HpcDetError if that fails.

    `key_for`: the key that a caller with this identity must prove; None if no such caller may exist. `is_allowed`:
    whether a caller may come from this address. The server's thread calls both. `gone_s`: seconds without an answer
    from a host after which its connection ends.
    """

    def __init__(
        self,
        host: str,
        key_for: Callable[[dict[str, Any]], bytes | None],
        is_allowed: Callable[[str], bool],
        on_event: Callable[[Event], None] | None = None,
        *,
        gone_s: float = GONE_S,
        has_thread: bool = True,
    ) -> None:
        self._key_for, self._is_allowed = key_for, is_allowed
        self._gone_s = gone_s
        try:
            server = socket.create_server((host, 0), backlog=4096)
        except OSError as error:
            raise HpcDetError(f"this node cannot listen on {host}: {error.strerror}") from None
        self.host, self.port = server.getsockname()[:2]
        super().__init__(server, on_event, has_thread=has_thread)

    def _admits(self, connection: socket.socket, address: Any) -> bool:
        return self._is_allowed(address[0])

    def _introduction(self, caller: _Caller) -> Generator[int, Bytes, Seals]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        caller.write(nonce)
        hello = yield from exactly(HELLO.size)
        client_nonce, proof, length = HELLO.unpack(hello)
        if length > LONGEST_IDENTITY:
            raise BrokenRule
        said = yield from exactly(length)
        caller.identity = parsed(said)
        handshake = Handshake(self._key_of(caller.identity), nonce, client_nonce, bytes(said))
        if not hmac.compare_digest(proof, handshake.client_proof):
            raise BrokenRule
        caller.write(handshake.listener_proof)
        set_up(caller.connection, self._gone_s)
        caller.seals = Seals(handshake.to_client)
        return Seals(handshake.to_listener)

    def _key_of(self, identity: dict[str, Any]) -> bytes:
        """Return the key that the caller must prove; for an unknown caller a random one."""
        # A random key fails like a wrong one, so a stranger does not learn which identities exist.
        with suppress(Exception):  # a stranger may send any identity
            if key := self._key_for(identity):
                return key
        return secrets.token_bytes(NONCE_BYTES)


class _Caller(Line):
    """The server's end of one connection. It queues what the network does not take at once, so no sender waits."""

    def __init__(self, connection: socket.socket, buffer: memoryview, send_later: Callable[[_Caller], None]) -> None:
        super().__init__(connection, buffer)
        self.is_dropped = False
        self._outbox: deque[memoryview] = deque()
        self._send_later = send_later

    def write(self, data: Bytes) -> None:
        with self._sending:
            self._write(data)

    def push(self) -> bool:
        """Send what the network takes now; return True if nothing is left."""
        with self._sending:
            return self._push()

    def close(self) -> None:
        """End the connection; the server notices the end and drops this object."""
        with self._sending, suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        self.is_dropped = True
        self.feed.close()
        with self._sending:
            self._outbox.clear()
            self.connection.close()

    @uninterrupted()
    def _put(self, unsealed: Unsealed) -> None:
        """Send a message without interruption by Ctrl-C."""
        # Between the number of a message and its bytes, an exception would invalidate the seals of all later messages.
        super()._put(unsealed)

    def _write(self, data: Bytes) -> None:
        self._outbox.append(memoryview(data))
        if not self._push():
            self._send_later(self)

    def _push(self) -> bool:
        """Send one piece, at most; return True if nothing is left."""
        try:
            # One piece only, so that senders that need the lock, and the server's thread, do not wait for a long body.
            if self._outbox:
                sent = self.connection.send(self._outbox[0])
                self._outbox[0] = self._outbox[0][sent:]
                if not self._outbox[0]:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._outbox.clear()
        return not self._outbox
