"""The lines between a node agent and its ranks: a Unix socket in a private folder of the node.

rank -> agent: {"hello": RANK, "pid": PID}, then {"signal": NAME} when a signal reaches the rank itself, and before it
exits {"exit": CODE}; agent -> rank: {"stop": REASON, "deadline": SECONDS SINCE THE EPOCH, OR NULL}, and to a rank that
has failed {"exit": CODE} when it may exit. The end of the line says the rest at once: a rank whose line ends before its
exit was reported is lost, and a rank whose agent is gone is an orphan. Heartbeats have lines of their own to the same
socket (hpc_det.node.heartbeat).

The folder lets in this user alone, so nobody shows a key. What is no such message ends its line, and nothing else.
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
"""Files that an agent may have open beside the lines of its ranks."""
ANSWER_S = 10.0
"""How long a failed rank waits for its agent, which answers at once unless the node is overloaded."""


def say_hello(line: Line, rank: int, pid: int) -> None:
    """At the rank's end. From now on the end of the line is the end of the rank."""
    line.send({"hello": rank, "pid": pid})


def report_exit(line: Line, code: int) -> None:
    """Send the rank's exit code, its last message. A failed rank returns only after the agent has looked for lost
    ranks, or after `ANSWER_S`: its launcher kills the others as soon as it exits, and these were not the cause.
    """
    line.send({"exit": code})
    if code:
        line.connection.settimeout(ANSWER_S)
        while (message := line.receive()) is not None and "exit" not in message.head:
            pass


class AgentSocket(LineServer):
    """The agent's end: all ranks of the node. Registers itself with `selector`; call `turn` every second at least."""

    def __init__(self, path: str, selector: selectors.BaseSelector) -> None:
        self.on_lost: Callable[[int], None] = lambda rank: None
        self.on_failed: Callable[[], None] = lambda: None
        self.on_signal: Callable[[str], None] = lambda name: None
        self.on_heartbeat: Callable[[Line, dict[str, Any]], None] = lambda line, message: None
        self.ranks: dict[int, int] = {}
        """Rank -> process id, of all that ever said hello."""
        self._stop: dict[str, Any] | None = None
        self._running: dict[Line, list[int]] = {}
        """By line, the ranks between their hello and the report of their exit."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(1024)
        super().__init__(server, self._take, has_thread=False)
        self._agents_selector = selector
        selector.register(self, selectors.EVENT_READ, self.turn)

    def send_stop(self, reason: str, deadline: float | None = None) -> None:
        """Tell every rank to stop, also those that are still starting. `deadline`: when they will be gone."""
        if self._stop is None:
            self._stop = {"stop": reason, "deadline": deadline}
            for line in list(self._lines):
                line.send(self._stop)

    def dead_ranks(self) -> list[int]:
        """The ranks that have reported no exit and whose processes have given back their memory, which comes before all
        else. A process that this node cannot see is not among them.
        """
        running = ((line.identity["pid"], ranks) for line, ranks in self._running.items())
        return [rank for pid, ranks in running if pid and has_no_memory(pid) for rank in ranks]

    def close(self) -> None:
        """Close all lines. A rank whose line ends now does not count as lost."""
        self._running.clear()
        self._agents_selector.unregister(self)
        super().close()

    def _admits(self, connection: socket.socket, address: Any) -> bool:
        return len(self._lines) < _most_lines() and peer_of(connection)[1] in (os.geteuid(), 0)

    def _introduction(self, caller: Line) -> Generator[int, Bytes, Seals]:
        caller.identity, caller.seals = {"pid": peer_of(caller.connection)[0]}, Seals(None)
        yield from ()
        return Seals(None)

    def _take(self, event: Event) -> None:
        """Raises BrokenRule."""
        if event.message is not None:
            self._obey(event.line, event.message.head)
        elif event.kind == "arrived" and self._stop is not None:
            event.line.send(self._stop)
        elif event.kind == "gone":
            for rank in self._running.pop(event.line, []):
                self.on_lost(rank)

    def _obey(self, line: Line, message: dict[str, Any]) -> None:
        """Raises BrokenRule."""
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
                self.on_failed()
                line.send({"exit": code})


def number_in(message: dict[str, Any], name: str) -> int:
    """Raises BrokenRule."""
    number = message.get(name)
    if type(number) is not int:
        raise BrokenRule
    return number


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, in this one's own numbers, and its user (unix(7), SO_PEERCRED);
    process 0 where this node cannot see it.
    """
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(user)


def _most_lines() -> int:
    """A rank that opens one after the other must not take all the files that its agent may open."""
    return max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - OTHER_FILES, OTHER_FILES)
