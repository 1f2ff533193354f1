"""The node agents of a gang: node 0 waits until all have come, and each of them holds a line to it, O(nodes) in all.

A line stands from an agent's first moment until it reports its exit. One that ends without it is a lost node: it was
powered off, its agent was killed, or it answered nothing for LOST_S. No agent sends heartbeats: the kernels ask each
other (tcp(7), SO_KEEPALIVE and TCP_USER_TIMEOUT), and answer for processes that are suspended, starved, or wait for a
file system, so none of these is taken for lost. Of a node that does not come the scheduler may know that it is down.

What else the agents send each other is the business of hpc_det.launch.watch.supervisor; how a line is opened and sealed
is that of hpc_det.node.
"""

from __future__ import annotations

import errno
import resource
import selectors
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.node.frames import Head
from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.lines import Line, connect
from hpc_det.node.network import Rendezvous
from hpc_det.node.suspension import AwakeClock
from hpc_det.schedulers.scheduler import NoAnswer, run_command, scheduler

ARRIVE_S = 600.0
"""Nodes of one job may start minutes apart: prologs, cold file systems."""
ASK_EVERY_S = 10.0
LOST_S = 15.0
"""A node whose kernel answers nothing for so long is lost."""
OTHER_FILES = 256
"""So many may the agent of node 0 have open beside the lines of the other nodes."""
ANSWER_S = 5.0
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""How the kernel reports it (tcp(7)): with the last error of the network, where there was one."""


class Arrivals:
    def __init__(self, scheduler_name: str, hosts: Sequence[str]) -> None:
        """`hosts`: of the gang's nodes, by rank."""
        self._scheduler = scheduler(scheduler_name)
        self._hosts = hosts
        self._clock = AwakeClock()
        self._ask_at = ASK_EVERY_S
        self._asking: threading.Thread | None = None
        self._down: Collection[str] = ()

    @property
    def are_late(self) -> bool:
        return self._clock.seconds() > ARRIVE_S

    def down(self, missing: Sequence[int]) -> list[int]:
        """Those of the missing nodes that the scheduler has called down since the last call."""
        now = self._clock.seconds()
        if missing and now >= self._ask_at and not (self._asking and self._asking.is_alive()):
            self._ask_at = now + ASK_EVERY_S
            self._asking = threading.Thread(target=self._ask, args=[missing], daemon=True)
            self._asking.start()
        known, self._down = self._down, ()
        return [node for node in missing if self._hosts[node] in known]

    def _ask(self, missing: Sequence[int]) -> None:
        """In a thread: a command may take as long as it likes."""
        try:
            self._down = self._scheduler.down_hosts([self._hosts[node] for node in missing], run_command)
        except NoAnswer:  # it is asked again
            pass
        except (HpcDetError, ValueError, KeyError):  # nodes may lack its commands
            self._ask_at = float("inf")


def key_of(secret: str) -> bytes:
    """What agents show each other, and ranks do not: from the secret in the private file of the rendezvous."""
    return derived(secret.encode(), "agents")


class Peers:
    """Node 0's end: the other nodes, by rank."""

    def __init__(self, selector: selectors.BaseSelector, host: str, nodes: int) -> None:
        """Listens at `host`, for nodes 1 to `nodes` - 1. Raises HpcDetError where it cannot."""
        self.on_message: Callable[[int, Head], None] = lambda node, message: None
        self.on_exit: Callable[[int, int], None] = lambda node, code: None
        """Called with the exit code that an agent reports."""
        self.on_lost: Callable[[int, str], None] = lambda node, why: None
        self.secret: str | None = None
        """Of the rendezvous; until it is published nobody can know where to come."""
        self._nodes = nodes
        self._lines: dict[int, Line] = {}
        """Of the nodes that have sent something and have not reported their exit."""
        self._selector = selector
        _allow_files(nodes + OTHER_FILES)
        self._board = TcpLineServer(host, self._key_for, lambda address: True, gone_s=LOST_S, has_thread=False)
        selector.register(self._board, selectors.EVENT_READ, self.poll)

    @property
    def port(self) -> int:
        return int(self._board.port)

    @property
    def present(self) -> set[int]:
        """The nodes that have come and not left."""
        return set(self._lines)

    def tell(self, message: Head, node: int | None = None) -> None:
        """To one node, or to all."""
        lines = [self._lines[node]] if node is not None else list(self._lines.values())
        for line in lines:
            line.send(message)

    def poll(self) -> None:
        """When something has come, and every second at least."""
        self._board.turn()
        while not self._board.events.empty():
            self._take(self._board.events.get())

    def await_exits(self, within_s: float) -> None:
        """Of all that are present."""
        clock = AwakeClock()
        with selectors.DefaultSelector() as selector:
            selector.register(self._board, selectors.EVENT_READ)
            while self._lines and clock.seconds() < within_s:
                selector.select(0.1)
                self.poll()

    def close(self) -> None:
        self._selector.unregister(self._board)
        self._board.close()

    def _key_for(self, identity: dict[str, Any]) -> bytes | None:
        node = identity["node"]
        is_awaited = type(node) is int and 0 < node < self._nodes and node not in self._lines
        return key_of(self.secret) if is_awaited and self.secret else None

    def _take(self, event: Event) -> None:
        node = event.line.identity["node"]
        if event.message is not None:
            self._take_message(node, event.line, event.message.head)
        elif event.kind == "gone" and self._lines.get(node) is event.line:
            del self._lines[node]
            self.on_lost(node, _why(event.line))

    def _take_message(self, node: int, line: Line, message: Head) -> None:
        if self._lines.setdefault(node, line) is not line:  # it has come twice
            line.close()
            return
        try:
            if "exit" in message:
                code = int(message["exit"])
                del self._lines[node]
                self.on_exit(node, code)
            else:
                self.on_message(node, message)
        except (KeyError, TypeError, ValueError):  # no message of an agent's
            line.close()


class ToNode0:
    """Another node's end."""

    def __init__(self, selector: selectors.BaseSelector, rendezvous: Rendezvous, node: int, within_s: float) -> None:
        """Raises NoLine where node 0 cannot be reached in time."""
        self.on_message: Callable[[Head], None] = lambda message: None
        self.on_exit: Callable[[int], None] = lambda code: None
        """Called with the exit code of node 0's agent, which leaves last unless something has failed, and waits for
        this one's report of its exit.
        """
        self.on_lost: Callable[[str], None] = lambda why: None
        self._selector = selector
        address, key = (rendezvous.host, rendezvous.agents_port), key_of(rendezvous.secret)
        identity = {"role": "agent", "node": node}
        self._line = connect(
            *address, key, identity, within_s, listener="the agent of node 0", gone_s=LOST_S, awaits_listener=False
        )
        self._is_open, self._has_left = True, False
        selector.register(self._line.connection, selectors.EVENT_READ, self._listen)
        self.tell({"hello": True})

    def tell(self, message: Head) -> None:
        self._line.send(message)

    def answered(self) -> bool:
        """Wait for a message; whether there was one, within `ANSWER_S`."""
        self._line.connection.settimeout(ANSWER_S)
        return self._line.receive() is not None

    def close(self, code: int) -> None:
        """Report the exit of this agent, and hang up."""
        if self._is_open:
            self.tell({"exit": code})
            self._hang_up()

    def _listen(self) -> None:
        stands = self._line.take()
        while self._is_open and self._line.received:
            message = self._line.received.popleft().head
            if "exit" in message:
                self._has_left = True
                self.on_exit(int(message["exit"]))
            else:
                self.on_message(message)
        if self._is_open and not stands:
            self._hang_up()
            if not self._has_left:
                self.on_lost(_why(self._line))

    def _hang_up(self) -> None:
        self._is_open = False
        self._selector.unregister(self._line.connection)
        self._line.close()


def _why(line: Line) -> str:
    """What became of a line that ended without a report of an exit."""
    if line.error and line.error.errno in _SILENT:
        return f"it has not answered for {LOST_S:g} s"
    return "its connection ended without a goodbye"


def _allow_files(needed: int) -> None:
    """A line is an open file, and 1,024 are what a process may have by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if resource.RLIM_INFINITY != soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
