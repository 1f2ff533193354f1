"""The listener's end of lines: whoever serves them listens and reads, and never waits for one of them.

Over TCP strangers are hung up on without a word. There are few of them at a time and not for long, the oldest goes
first, and nothing that they say is believed before they have shown the key.
"""

from __future__ import annotations

import hmac
import logging
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
"""Connections that have not shown the key yet, at a time; with one more, the oldest is closed."""
PATIENCE_S = 5.0
"""Seconds after which a connection that has not shown the key is closed."""
REST_S = 0.5
"""Seconds without accepting connections when this process can open no more files; they wait in the kernel's queue."""
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_log = logging.getLogger(__name__)


class Event(NamedTuple):
    kind: Literal["arrived", "said", "gone"]
    line: Line
    message: Message | None
    """Of what was said."""


class LineServer:
    """Serves the lines of one listening socket. `on_event`: takes the events instead of the queue, and is called by the
    server's thread. Without a thread, `turn` does the work whenever `fileno` is readable, and every second at least.
    """

    def __init__(
        self, server: socket.socket, on_event: Callable[[Event], None] | None = None, *, has_thread: bool = True
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._emit = on_event or self.events.put
        self.answers: dict[str, Callable[[Line, Message], None]] = {}
        """By a message's "do": called by the server's thread, and the message is no event."""
        self._server = server
        self._server.setblocking(False)
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._strangers: dict[_Caller, float] = {}
        """Connections that have not shown the key yet, the oldest first, and when each is closed."""
        self._lines: set[_Caller] = set()
        self._rests_until: float | None = None
        """While no connection is accepted."""
        self._unsent: deque[_Caller] = deque()
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
        """Whether to listen at all to whoever has connected."""
        raise NotImplementedError

    def _introduction(self, caller: _Caller) -> Generator[int, Bytes, Seals]:
        """Find out who calls, and set its `identity` and `seals`; the seals of what it sends. Raises BrokenRule."""
        raise NotImplementedError

    def turn(self) -> None:
        """Do what there is to do, without waiting."""
        self._patience()
        for key, ready in self._selector.select(0):
            key.data(ready)

    def close(self) -> None:
        """Every line ends, and what has not left yet is lost."""
        if self._is_open:
            self._is_open = False
            if self._thread:
                os.eventfd_write(self._bell, 1)
                self._thread.join()
            else:
                self._end()
            os.close(self._bell)

    def let_go(self) -> None:
        """In a forked child: the connections are the parent's, and end with it."""
        if self._is_open:  # else the number of the bell may be another file's
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
        """Hang up on those with whom it is at an end, and end a rest; how long it lasts with the next one."""
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
            return  # otherwise the caller has gone again
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
        except Exception:  # ends this line, and no other
            _log.exception("%r of %s could not be answered, and its line is hung up", do, caller.identity)
            raise BrokenRule from None

    def _attend(self, caller: _Caller, ready: int) -> None:
        if caller.is_dropped:  # meanwhile, in favour of a newer stranger
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
    """Listens at a free port of the one address `host`. Raises HpcDetError where it cannot.

    `key_for`: the key that whoever has this identity must show; None where there can be nobody like that.
    `is_allowed`: whether anybody may come from that address. Both are called by the server's thread. `gone_s`: a silent
    host is given up then.
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
        """For somebody who cannot be, one that nobody holds: all are refused alike."""
        with suppress(Exception):  # a stranger may say anything of itself
            if key := self._key_for(identity):
                return key
        return secrets.token_bytes(NONCE_BYTES)


class _Caller(Line):
    """The server's end: what the network does not take at once leaves later, and no sender waits."""

    def __init__(self, connection: socket.socket, buffer: memoryview, send_later: Callable[[_Caller], None]) -> None:
        super().__init__(connection, buffer)
        self.is_dropped = False
        self._outbox: deque[memoryview] = deque()
        self._send_later = send_later

    def write(self, data: Bytes) -> None:
        with self._sending:
            self._write(data)

    def push(self) -> bool:
        """Send what the network takes now; whether that was all."""
        with self._sending:
            return self._push()

    def close(self) -> None:
        """The server sees the end, and drops it."""
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
        """A number without its message would end the line."""
        super()._put(unsealed)

    def _write(self, data: Bytes) -> None:
        self._outbox.append(memoryview(data))
        if not self._push():
            self._send_later(self)

    def _push(self) -> bool:
        """One piece at a time: whoever else needs the lock, or the server, need not wait for a long body."""
        try:
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
