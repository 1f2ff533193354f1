"""The connections between a node agent and its ranks, over a Unix socket in a private folder of the node.

A rank sends {"hello": RANK, "pid": PID}, then {"signal": NAME} for each signal that it receives itself, and before it
exits {"exit": CODE}. The agent sends {"stop": REASON, "deadline": SECONDS SINCE THE EPOCH, OR NULL}, with "joined": the
ranks that receive it, to a connection without a rank, such as a launcher's; and to a failed rank {"exit": CODE} as
permission to exit. The end of the connection is a message, too: a rank whose connection ends
before it has reported its exit is lost, and a rank whose agent has exited is an orphan. Heartbeats use separate
connections to the same socket (hpc_det.node.heartbeat).

Only this user can enter the folder, so no key is exchanged. An invalid message closes the connection that it came from
and has no other effect.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import struct
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from hpc_det.node.frames import BrokenRule, Seals
from hpc_det.node.line_server import Event, LineServer
from hpc_det.node.lines import Line
from hpc_det.node.process import has_no_memory

if TYPE_CHECKING:
    from hpc_det.node.frames import Bytes

OTHER_FILES = 128
"""Number of files that an agent may have open besides its ranks' connections."""
ANSWER_S = 10.0
"""Seconds that a failed rank waits for its agent's answer, which is delayed only if the node is overloaded."""


def say_hello(line: Line, rank: int, pid: int) -> None:
    """Report the rank's number and process id; from then on the end of the connection counts as the end of the rank."""
    line.send({"hello": rank, "pid": pid})


def report_exit(line: Line, code: int) -> None:
    """Report the rank's exit code, its last message; after a failure wait for the agent's answer, ANSWER_S at most."""
    line.send({"exit": code})
    if code:
        # The launcher kills the other ranks as soon as this one exits. Waiting lets the agent first look for ranks that
        # were lost before: they are the cause, and those that the launcher kills are not.
        line.connection.settimeout(ANSWER_S)
        while (message := line.receive()) is not None and "exit" not in message.head:
            pass


class AgentSocket(LineServer):
    """The agent's end of the connections to all ranks of its node.

    It registers itself with `selector`; the agent calls `turn` at least once a second.
    """

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self.on_lost: Callable[[int], None] = lambda rank: None
        """Called with a rank whose connection ended before it reported its exit."""
        self.on_failed: Callable[[], None] = lambda: None
        """Called when a rank has reported an exit code other than 0."""
        self.on_signal: Callable[[str], None] = lambda name: None
        """Called with the name of a signal that a rank has received."""
        self.on_heartbeat: Callable[[Line, dict[str, Any]], None] = lambda line, message: None
        """Called with a message of a heartbeat. May raise BrokenRule."""
        self.ranks: dict[int, int] = {}
        """Process id of every rank that has ever sent a hello, keyed by rank."""
        self._stop: dict[str, Any] | None = None
        """The stop request as a message; None before one was sent."""
        self._running: dict[Line, list[int]] = {}
        """Ranks that have sent a hello and have not reported their exit, keyed by connection."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        os.chmod(path, 0o600)
        # All ranks of a node may connect at the same moment.
        server.listen(1024)
        super().__init__(server, self._take, has_thread=False)
        self._agents_selector = selector
        selector.register(self, selectors.EVENT_READ, self.turn)

    def send_stop(self, reason: str, deadline: float | None = None) -> None:
        """Send the stop request to every rank; a rank that connects later receives it on connecting.

        `deadline`: when the scheduler ends the ranks, in seconds since the epoch; None if unknown. Later calls do
        nothing.
        """
        if self._stop is None:
            self._stop = {"stop": reason, "deadline": deadline}
            joined = [rank for ranks in self._running.values() for rank in ranks]
            for line in list(self._lines):
                line.send(self._stop if line in self._running else {**self._stop, "joined": joined})

    def dead_ranks(self) -> list[int]:
        """Return the ranks that have reported no exit and whose processes have released their memory.

        Processes that this node cannot see (`peer_of` returns 0) are left out.
        """
        running = ((line.identity["pid"], ranks) for line, ranks in self._running.items())
        # A dying process releases its memory before it closes its sockets, so this finds ranks whose connections are
        # still open.
        return [rank for pid, ranks in running if pid and has_no_memory(pid) for rank in ranks]

    def close(self) -> None:
        """Close all connections. Ranks whose connections end by this call do not count as lost."""
        self._running.clear()
        self._agents_selector.unregister(self)
        super().close()

    def _admits(self, connection: socket.socket, address: Any) -> bool:
        return len(self._lines) < _most_lines() and peer_of(connection)[1] in (os.geteuid(), 0)

    def _introduction(self, caller: Line) -> Generator[int, Bytes, Seals]:
        """Accept any caller that `_admits` let in: the kernel supplies its process id and user."""
        caller.identity, caller.seals = {"pid": peer_of(caller.connection)[0]}, Seals(None)
        yield from ()
        return Seals(None)

    def _take(self, event: Event) -> None:
        """Handle one event. Raises BrokenRule if a message is invalid."""
        if event.message is not None:
            self._obey(event.line, event.message.head)
        elif event.kind == "arrived" and self._stop is not None:
            event.line.send(self._stop)
        elif event.kind == "gone":
            for rank in self._running.pop(event.line, []):
                self.on_lost(rank)

    def _obey(self, line: Line, message: dict[str, Any]) -> None:
        """Handle one message. Raises BrokenRule if it is invalid."""
        if "hello" in message:
            rank = number_in(message, "hello")
            self.ranks[rank] = number_in(message, "pid")
            self._running.setdefault(line, []).append(rank)
        elif "heartbeat" in message:
            self.on_heartbeat(line, message)
        elif "signal" in message:
            self.on_signal(str(message["signal"]))
        elif "exit" in message:
            code = number_in(message, "exit")
            self._running.pop(line, None)
            if code:
                # Before the answer: the rank exits after it, and its launcher then kills the other ranks.
                self.on_failed()
                line.send({"exit": code})


def number_in(message: dict[str, Any], name: str) -> int:
    """Return the integer under `name`. Raises BrokenRule if it is missing or of another type."""
    number = message.get(name)
    if type(number) is not int:
        raise BrokenRule
    return number


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the process at the other end of a Unix socket (unix(7), SO_PEERCRED).

    The process id is that of this process's PID namespace; 0 if the other process is not visible in it.
    """
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(user)


def _most_lines() -> int:
    """Return the largest number of connections that the agent accepts."""
    # A rank that opens one connection after another must not use up all files that its agent may open.
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES, OTHER_FILES)
