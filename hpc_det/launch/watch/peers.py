"""The connections between a gang's node agents: each agent has one to node 0, which waits until all have connected.

A connection lasts from an agent's start until it reports its exit. If it ends earlier, the node is lost: it was powered
off, its agent was killed, or it did not answer for LOST_S. The agents send no heartbeats. The kernels probe each other
instead (tcp(7), SO_KEEPALIVE and TCP_USER_TIMEOUT) and answer even for a process that is suspended, starved, or waits
for a file system, so such a node does not count as lost. While a node is missing, node 0 asks the scheduler whether it
is down.

hpc_det.launch.watch.supervisor defines the other messages of the agents, hpc_det.node the opening and authentication of
connections.
"""

from __future__ import annotations

import errno
import selectors
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.launch.orders import LOST_S as LOST_S
from hpc_det.node.frames import Head
from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.lines import Line, connect, send_to
from hpc_det.node.network import Rendezvous, allow_files
from hpc_det.node.suspension import AwakeClock
from hpc_det.schedulers.scheduler import NoAnswer, run_command, scheduler

ARRIVE_S = 600.0
"""Seconds for all nodes to connect; they may start minutes apart because of prologs and cold file systems."""
ASK_EVERY_S = 10.0
"""Seconds between two queries of the scheduler for missing nodes."""
OTHER_FILES = 256
"""Number of files that node 0's agent may have open besides its connections."""
ANSWER_S = 5.0
"""Seconds that an unhealthy node waits for node 0's answer."""
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}
"""Errors that end a connection whose host does not answer (tcp(7)): a timeout, or the last error of the network."""


class Arrivals:
    """Waits for the nodes of a gang to connect."""

    def __init__(self, scheduler_name: str, hosts: Sequence[str]) -> None:
        """`hosts`: the gang's nodes, by rank."""
        self._scheduler = scheduler(scheduler_name)
        self._hosts = hosts
        self._clock = AwakeClock()
        self._ask_at = ASK_EVERY_S
        self._asking: threading.Thread | None = None
        self._down: Collection[str] = ()

    @property
    def are_late(self) -> bool:
        """True if nodes are still missing after ARRIVE_S."""
        return self._clock.seconds() > ARRIVE_S

    def down(self, missing: Sequence[int]) -> list[int]:
        """Return those of the missing nodes that the scheduler has reported as down since the last call."""
        now = self._clock.seconds()
        if missing and now >= self._ask_at and not (self._asking and self._asking.is_alive()):
            self._ask_at = now + ASK_EVERY_S
            # In a thread, because the scheduler's command may block for any time.
            self._asking = threading.Thread(target=self._ask, args=[missing], daemon=True)
            self._asking.start()
        known, self._down = self._down, ()
        return [node for node in missing if self._hosts[node] in known]

    def _ask(self, missing: Sequence[int]) -> None:
        """Query the scheduler for missing nodes that are down."""
        try:
            self._down = self._scheduler.down_hosts([self._hosts[node] for node in missing], run_command)
        except NoAnswer:  # the next query may succeed
            pass
        except (HpcDetError, ValueError, KeyError):  # nodes may lack the scheduler's commands, so stop asking
            self._ask_at = float("inf")


def key_of(secret: str) -> bytes:
    """Return the agents' key, derived from the rendezvous' secret, which only this user can read; ranks use other
    keys.
    """
    return derived(secret.encode(), "agents")


class Peers:
    """Node 0's end: the connections of the other nodes."""

    def __init__(self, selector: selectors.BaseSelector, host: str, nodes: int) -> None:
        """Listen at `host` for nodes 1 to `nodes` - 1. Raises HpcDetError if that fails."""
        self.on_message: Callable[[int, Head], None] = lambda node, message: None
        """Called with a node's rank and its message."""
        self.on_exit: Callable[[int, int], None] = lambda node, code: None
        """Called with a node's rank and the exit code that its agent reports."""
        self.on_lost: Callable[[int, str], None] = lambda node, why: None
        """Called with the rank of a lost node, and why it is lost."""
        self.secret: str | None = None
        """The rendezvous' secret; None until it is published, and no agent can connect before."""
        self._nodes = nodes
        self._lines: dict[int, Line] = {}
        """Connections of the nodes that have sent something and have not reported their exit, keyed by node rank."""
        self._selector = selector
        allow_files(nodes + OTHER_FILES)
        # Callers from any address: an agent proves that it belongs to the gang by its key.
        self._board = TcpLineServer(host, self._key_for, lambda address: True, gone_s=LOST_S, has_thread=False)
        selector.register(self._board, selectors.EVENT_READ, self.poll)

    @property
    def port(self) -> int:
        return int(self._board.port)

    @property
    def present(self) -> set[int]:
        """The nodes that have connected and have not reported their exit."""
        return set(self._lines)

    def tell(self, message: Head, node: int | None = None) -> None:
        """Send a message to one node, or to all."""
        send_to([self._lines[node]] if node is not None else list(self._lines.values()), message)

    def poll(self) -> None:
        """Handle what has arrived; called when the server is readable, and at least once a second."""
        self._board.turn()
        while not self._board.events.empty():
            self._take(self._board.events.get())

    def await_exits(self, within_s: float) -> None:
        """Wait until all present nodes have reported their exit, for at most `within_s`."""
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
        """Return the key for a node that is expected and not connected, else None."""
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
        if self._lines.setdefault(node, line) is not line:  # a second connection of the same node
            line.close()
            return
        try:
            if "exit" in message:
                code = int(message["exit"])
                del self._lines[node]
                self.on_exit(node, code)
            else:
                self.on_message(node, message)
        except (KeyError, TypeError, ValueError):  # the message is invalid
            line.close()


class ToNode0:
    """Another node's end: its connection to node 0."""

    def __init__(self, selector: selectors.BaseSelector, rendezvous: Rendezvous, node: int, within_s: float) -> None:
        """Connect to node 0. Raises NoLine if that fails within `within_s`."""
        self.on_message: Callable[[Head], None] = lambda message: None
        """Called with each message of node 0."""
        self.on_exit: Callable[[int], None] = lambda code: None
        """Called with the exit code of node 0's agent.

        Unless something has failed, that agent exits last, and waits for this one's report of its exit.
        """
        self.on_lost: Callable[[str], None] = lambda why: None
        """Called with the reason if node 0 is lost."""
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
        """Send a message to node 0."""
        self._line.send(message)

    def answered(self) -> bool:
        """Wait for a message, for at most `ANSWER_S`; return whether one came."""
        self._line.connection.settimeout(ANSWER_S)
        return self._line.receive() is not None

    def close(self, code: int) -> None:
        """Report the exit of this agent, and close the connection."""
        if self._is_open:
            self.tell({"exit": code})
            self._hang_up()

    def _listen(self) -> None:
        """Handle what has arrived from node 0."""
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
    """Return why a connection ended without a report of an exit."""
    if line.error and line.error.errno in _SILENT:
        return f"it has not answered for {LOST_S:g} s"
    return "its connection ended before it reported its exit"
