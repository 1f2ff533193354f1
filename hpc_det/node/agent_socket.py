"""The line between a node agent and its ranks: a Unix socket in a private folder of the node.

rank -> agent: {"hello": RANK, "pid": PID}, then {"heard": SIGNAL} when a signal reaches the rank itself, and before it
leaves {"bye": CODE}; agent -> rank: {"stop": REASON, "deadline": SECONDS SINCE THE EPOCH, OR NULL}, and to a rank that
has failed {"bye": CODE} when it may leave. The end of the line says the rest at once: a rank that is gone without a bye
was lost, and a rank whose agent is gone is an orphan. Hearts have lines of their own to the same socket
(hpc_det.node.heartbeat).

The folder lets in this user alone, so nobody shows a key. What is no such message ends its line, and nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpc_det.node.frames import BrokenRule, parsed
from hpc_det.node.network import NO_MORE_FILES
from hpc_det.node.process import has_no_memory

LONGEST_MESSAGE = 2**20
"""In bytes: what is longer was sent by no agent and no rank."""
OTHER_FILES = 128
"""So many may an agent have open beside the lines of its ranks."""

ANSWER_S = 10.0
"""How long a failed rank waits for its agent, which answers at once unless the node is overloaded."""
REST_S = 0.1
"""For an agent that can open no more files, before it looks again at who connects."""


class Line:
    """One end of a connection that carries JSON lines."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._partial = b""

    def send(self, message: dict[str, Any]) -> None:
        """Nothing is raised when the other end is gone: `receive` tells."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived, waiting for some; None at the end of the line and after what is none."""
        try:
            data = self.connection.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_MESSAGE:
            return None
        try:
            return [parsed(line) for line in lines]
        except BrokenRule:
            return None

    def say_goodbye(self, code: int) -> None:
        """Send the rank's exit code, its last message. A failed rank returns only after the agent has looked for lost
        ranks, or after `ANSWER_S`: its launcher kills the others as soon as it exits, and these were not the cause.
        """
        self.send({"bye": code})
        if code:
            self.connection.settimeout(ANSWER_S)
            while (messages := self.receive()) is not None and not any("bye" in message for message in messages):
                pass

    @classmethod
    def connect(cls, path: str) -> Line:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return cls(connection)


class Doorbell:
    """The agent's end: all ranks of the node."""

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self.on_lost: Callable[[int], None] = lambda rank: None
        self.on_failed: Callable[[], None] = lambda: None
        self.on_heard: Callable[[str], None] = lambda signal: None
        self.on_heart: Callable[[Line, dict[str, Any]], None] = lambda line, message: None
        self.ranks: dict[int, int] = {}
        """Rank -> process id, of all that ever said hello."""
        self._rung: dict[str, Any] | None = None
        self._lines: list[Line] = []
        self._aboard: dict[int, int] = {}
        """Rank -> process as this node knows it, of those between hello and bye; 0 where it cannot see that."""
        self._selector = selector
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        os.chmod(path, 0o600)
        self._server.listen(1024)
        selector.register(self._server, selectors.EVENT_READ, self._accept)

    def ring(self, reason: str, deadline: float | None = None) -> None:
        """Tell every rank to stop, also those that are still starting. `deadline`: when they will be gone."""
        if self._rung is None:
            self._rung = {"stop": reason, "deadline": deadline}
            for line in self._lines:
                line.send(self._rung)

    def gone(self) -> list[int]:
        """The ranks without a bye whose processes have given back their memory, which comes before all else."""
        return [rank for rank, pid in self._aboard.items() if pid and has_no_memory(pid)]

    def close(self) -> None:
        for line in list(self._lines):
            self._drop(line)
        self._selector.unregister(self._server)
        self._server.close()

    def _accept(self) -> None:
        try:
            line = Line(self._server.accept()[0])
        except OSError as error:
            if error.errno in NO_MORE_FILES:  # the selector would report the same connection again at once
                time.sleep(REST_S)
            return  # otherwise the caller has gone again
        if len(self._lines) >= _most_lines() or peer_of(line.connection)[1] not in (os.geteuid(), 0):
            line.connection.close()
            return
        self._lines.append(line)
        on_board: list[int] = []
        self._selector.register(line.connection, selectors.EVENT_READ, lambda: self._listen(line, on_board))
        if self._rung is not None:
            line.send(self._rung)

    def _listen(self, line: Line, on_board: list[int]) -> None:
        """`on_board` holds the rank at the other end from its hello to its bye."""
        messages = line.receive()
        try:
            for message in messages or ():
                self._take(line, message, on_board)
        except BrokenRule:
            messages = None
        if messages is None:
            self._drop(line)
            for rank in on_board:
                self._aboard.pop(rank, None)
                self.on_lost(rank)

    def _take(self, line: Line, message: dict[str, Any], on_board: list[int]) -> None:
        """Raises BrokenRule."""
        if "hello" in message:
            rank = number_in(message, "hello")
            self.ranks[rank] = number_in(message, "pid")
            on_board.append(rank)
            self._aboard[rank] = peer_of(line.connection)[0]
        elif "heart" in message:
            self.on_heart(line, message)
        elif "heard" in message:
            self.on_heard(str(message["heard"]))
        elif "bye" in message:
            code = number_in(message, "bye")
            for rank in on_board:
                self._aboard.pop(rank, None)
            on_board.clear()
            if code:
                self.on_failed()
                line.send({"bye": code})

    def _drop(self, line: Line) -> None:
        self._lines.remove(line)
        self._selector.unregister(line.connection)
        line.connection.close()


def number_in(message: dict[str, Any], name: str) -> int:
    """Raises BrokenRule."""
    number = message.get(name)
    if type(number) is not int:
        raise BrokenRule
    return number


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, in this one's own numbers, and its user (unix(7), SO_PEERCRED)."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(user)


def _most_lines() -> int:
    """A rank that opens one after the other must not take all the files that its agent may open."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES, OTHER_FILES)
