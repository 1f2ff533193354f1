"""The driver's view of the node agents: they connect, send messages, stop responding, and are lost.

The driver's own process may be one of the nodes, with rank 0 in it.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from hpc_det.checkpoint.snapshots import BUFFERS, Buffer, Held, keep
from hpc_det.errors import count
from hpc_det.node.frames import Message
from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.network import allow_many_files
from hpc_det.node.process import uninterrupted
from hpc_det.node.suspension import AwakeClock
from hpc_det.sgd.capacity import Capacity
from hpc_det.sgd.driver.failures import NotEnoughRanks
from hpc_det.sgd.driver.lacking_slots import LackingSlots
from hpc_det.sgd.elastic.meeting import DriverAddress, Guests, announce, check_free, claim, withdraw
from hpc_det.sgd.elastic.wait_report import WaitReport
from hpc_det.sgd.rank import RankSettings
from hpc_det.sgd.rank.worker import RankWorker
from hpc_det.store.run_folder import RunFolder

MOST_STARTS = 5
"""Number of starts without a connected agent after which no more agents are started."""
POLL_S = 1.0
"""Longest time in seconds to wait for a message before nodes are checked for silence."""
LOOK_S = 0.05
"""Shortest time in seconds between two checks of all nodes: a check after each message of 1,000 nodes took 22 % of a
CPU.
"""


class NodeLine(Protocol):
    """The connection to a node agent, or to the driver's own process in the role of one."""

    @property
    def heard_at(self) -> float:
        """time.monotonic() when the last message was received."""

    def send(self, head: dict[str, Any], body: bytes = b"") -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class GangNode:
    """A node whose agent is connected."""

    line: NodeLine
    host: str
    slots: int
    """Number of ranks that the node has room for."""
    job: str | None = None
    """The id of the scheduler's job that the agent is in; None without a scheduler."""
    is_leaving: bool = False
    """Whether the scheduler has announced that it takes the node away: no new ranks are started there."""
    is_broken: bool = False
    """Whether ranks failed on it repeatedly: no new ranks are started there until its agent is replaced."""
    is_suspended: bool = False
    """Whether the scheduler reported the node's job as suspended at the last check at which the node was silent."""
    excused_at: float = 0.0
    """time.monotonic() of the last check at which the node was silent because its job was suspended; 0 for none."""

    @property
    def is_paused(self) -> bool:
        """True if the node has sent nothing since a check that found its job suspended."""
        return self.excused_at > self.line.heard_at

    def __str__(self) -> str:
        return self.host


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Timeouts in seconds."""

    heartbeat_timeout_s: float = 10.0
    """Time without a message after which a node counts as lost."""
    startup_timeout_s: float | None = None
    """Time to wait for enough slots; None: no limit if jobs wait in a queue, else DEFAULT_START_S."""
    hang_timeout_s: int | None = None
    """Time without progress after which the gang counts as hung; None: derived from the times of batches."""


DEFAULT_START_S, LEAVE_S = 100.0, 5.0
"""Default seconds to wait for enough slots (RaySGD's default), and for agents to exit on request."""
TOGETHER_S = 10.0
"""Seconds to wait for more nodes after the minimum is reached: nodes that start together connect one by one."""


class Nodes:
    """The connected nodes, and the socket on which the driver listens. One thread calls all methods."""

    def __init__(self, run: RunFolder, capacity: Capacity, patience: Patience) -> None:
        self.on_lost: Callable[[GangNode], None] = lambda node: None
        """Called when the connection to a node has ended, or the node was dropped for its silence."""
        self.on_said: Callable[[GangNode, dict[str, Any]], None] = lambda node, head: None
        """Called with the messages of agents, except notices that a node will be taken away."""
        self.on_rank: Callable[[Event], None] = lambda event: None
        """Called with the events of the ranks' connections."""
        self.run = run
        self._nodes: list[GangNode] = []
        self._own: GangNode | None = None
        """The node that is this process, if there is one."""
        self._missing: set[str] = set()
        """Hosts whose agent was lost and has not connected again."""
        self._wanted = 0
        """Number of slots for which agents are started again; 0 during shutdown."""
        self._renewed_at = self._next_look = 0.0
        self._starts = 0
        """Number of starts of agents since the last connection."""
        self._is_in_vain = False
        """Whether no agent has connected in MOST_STARTS starts, and none can connect any more."""
        self._report: WaitReport | None = None
        """The report of what is awaited; None if nothing is."""
        self.attentive_since = 0.0
        """time.monotonic() when this process last found that it had been suspended, or too busy to read messages."""
        self._clock = AwakeClock(POLL_S)
        self._capacity = capacity
        self._patience = patience
        # Before the server is created: Guests removes files with which agents connect to the driver of this run.
        check_free(run)
        allow_many_files()  # one socket per rank: the usual soft limit of 1,024 would limit the number of ranks
        self.generation = 0
        """Number of the current gang; only its ranks may connect."""
        self._key = run.key()
        self._guests = Guests(run, capacity.host)
        self._board = TcpLineServer(capacity.host, self._key_for, self._guests.are_allowed_from)
        try:
            self._claim = claim(run, DriverAddress(*self.address))
            announce(run, *self.address)
        except BaseException:
            self._board.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Host and port on which the driver listens."""
        return self._board.host, self._board.port

    @property
    def slots(self) -> int:
        """The number of slots, used or not, of all nodes that stay and are not broken."""
        return sum(node.slots for node in self.staying)

    @property
    def staying(self) -> list[GangNode]:
        """The nodes on which new ranks may be started: they are not taken away and not broken."""
        return [node for node in self._nodes if not node.is_leaving and not node.is_broken]

    @property
    def are_suspended(self) -> bool:
        """True if the job of a node is suspended, so that the gang cannot make progress."""
        return any(node.is_paused for node in self._nodes)

    def suspended_jobs(self) -> str:
        """Return the suspended jobs as the end of a sentence; "" if there are none."""
        jobs = {str(node.job) for node in self._nodes if node.is_paused}
        return f"; suspended by the scheduler: {', '.join(sorted(jobs))}" if jobs else ""

    @property
    def is_taken(self) -> bool:
        """True if the scheduler takes away all nodes of the allocation that the driver itself is in."""
        # With a queue the driver is outside of the nodes' jobs, and other jobs may start.
        return bool(self._nodes) and all(node.is_leaving for node in self._nodes) and not self._capacity.has_queue

    @property
    def start_s(self) -> float:
        """Seconds to wait for enough slots; infinite while jobs wait in a queue."""
        if self._patience.startup_timeout_s is not None:
            return self._patience.startup_timeout_s
        return float("inf") if self._capacity.has_queue else DEFAULT_START_S

    def __contains__(self, node: GangNode) -> bool:
        return node in self._nodes

    def start(self, wanted: int) -> None:
        """Start agents for `wanted` ranks; from now on agents that have ended are started again."""
        self._wanted, self._starts = wanted, 1
        self._capacity.start(self.run.path, wanted)

    def add(self, node: GangNode) -> None:
        """Add this process as a node, before all others, so that rank 0 is on it."""
        self._own = node
        self._nodes.insert(0, node)

    def answer(self, do: str, by: Callable[[Any, Message], None]) -> None:
        """Let `by` handle the ranks' requests of this kind, in the thread that reads the connections."""
        self._board.answers[do] = by

    def await_slots(self, wanted: int, least: int) -> None:
        """Wait until there are `wanted` slots, or at least `least` and no more for TOGETHER_S seconds.

        Raises NotEnoughRanks, with the state of the capacity and the agents' errors: after `start_s`, or if no agent
        has connected in MOST_STARTS starts.
        """
        end, enough_since = time.monotonic() + self.start_s, float("inf")
        lacking = LackingSlots(self.run, self._capacity, self._guests, *self.address)
        with self.reported(
            lambda: f"slots for {self.slots} of {count(wanted, 'rank')}; {lacking.state(self._has_agents)}"
        ):
            while self.slots < wanted and time.monotonic() < min(end, enough_since + TOGETHER_S):
                self.hear(min(POLL_S, end - time.monotonic()))
                is_enough = self.slots >= least
                enough_since = min(enough_since, time.monotonic()) if is_enough else float("inf")
                if self._is_in_vain and not is_enough:
                    self._starts, self._is_in_vain = 0, False  # a later call starts agents again
                    raise NotEnoughRanks(
                        f"no agent has connected to the driver in {MOST_STARTS} starts: {lacking.state(False)}; "
                        f"{lacking.remedy()}"
                    )
        if self.slots < least:
            raise NotEnoughRanks(
                f"needs at least {count(least, 'rank')}, but there are slots for {self.slots} after "
                f"{self.start_s:g} s (startup_timeout_s); {lacking.state(self._has_agents)}; {lacking.remedy()}"
            )

    @contextmanager
    def reported(self, state: Callable[[], str]) -> Iterator[None]:
        """Log a line every REPORT_S seconds while this block calls `hear`; `state`: returns what is awaited."""
        former, self._report = self._report, WaitReport(state)
        try:
            yield
        finally:
            self._report = former

    @property
    def _has_agents(self) -> bool:
        """True if an agent is connected."""
        return any(node is not self._own for node in self._nodes)

    def hear(self, within_s: float) -> bool:
        """Handle the next event, waiting for it for up to `within_s` seconds; return whether there was one.

        Also drop silent nodes and start missing agents again.
        """
        try:
            event = self._board.events.get(block=within_s > 0, timeout=max(within_s, 0.0) or None)
        except queue.Empty:
            event = None
        if time.monotonic() >= self._next_look:  # a check visits all nodes: too slow for each of a thousand heartbeats
            self._next_look = time.monotonic() + LOOK_S
            self._drop_silent()
            self._renew()
            if self._report:
                self._report.look()
        if event is None:
            return False
        role = event.line.identity["role"]
        if role == "rank":
            self.on_rank(event)
        elif role == "node":  # else another driver that checks whether this one is alive
            with uninterrupted():  # a Ctrl-C must not lose the event: a node announces its arrival only once
                self._hear_node(event)
        return True

    def wait(self, seconds: float) -> None:
        """Wait, and handle the events that arrive meanwhile."""
        end = time.monotonic() + seconds
        with self.reported(lambda: f"the next try is in {max(end - time.monotonic(), 0):.0f} s"):
            while (left := end - time.monotonic()) > 0:
                self.hear(min(left, POLL_S))

    def close(self) -> None:
        """End all agents and jobs, and stop listening."""
        self._wanted = 0  # agents that exit now are not started again
        for node in self._nodes:
            node.line.send({"do": "leave"})
        end = time.monotonic() + LEAVE_S
        with ExitStack() as ends:  # all of them, also after a Ctrl-C
            ends.callback(self._board.close)
            ends.callback(self._claim.withdraw)
            ends.callback(withdraw, self.run)
            ends.callback(self._capacity.stop)
            while self._has_agents and time.monotonic() < end:
                self.hear(end - time.monotonic())

    def _key_for(self, identity: dict[str, Any]) -> bytes | None:
        """Return the key of a connection with this identity, or None to reject it.

        Nodes use the key of the run, ranks a key derived for their generation.
        """
        # A key for each generation, so that ranks of an earlier one cannot connect any more.
        if identity.get("role") in ("node", "driver"):
            return self._key
        is_of_now = identity.get("role") == "rank" and identity.get("generation") == self.generation
        return derived(self._key, f"generation {self.generation}") if is_of_now else None

    def _hear_node(self, event: Event) -> None:
        """Handle the arrival, a message or the loss of a node."""
        if event.kind == "arrived":
            identity = event.line.identity
            self._nodes.append(GangNode(event.line, str(identity["host"]), int(identity["slots"]), identity["job"]))
            self._missing.discard(str(identity["host"]))
            self._starts, self._is_in_vain = 0, False
            return
        for node in [node for node in self._nodes if node.line is event.line]:
            if event.message is None:
                self._lose(node)
            elif "leaving" in event.message.head:
                self._mark_leaving(node)
            else:
                self.on_said(node, event.message.head)

    def _mark_leaving(self, notified: GangNode) -> None:
        """Mark a node, and all nodes of the same job, as being taken away."""
        # Schedulers take whole jobs, but PBS sends the signal only to the first node.
        for node in self._nodes:
            node.is_leaving |= node is notified or (node.job is not None and node.job == notified.job)

    def _lose(self, node: GangNode) -> None:
        """Remove a node whose connection has ended, and report it to `on_lost`."""
        self._nodes.remove(node)
        self._missing.add(node.host)
        self.on_lost(node)

    def _drop_silent(self) -> None:
        """Drop the nodes that have sent nothing for `heartbeat_timeout_s`, unless their job is suspended."""
        now = time.monotonic()
        if self._clock.stopped_s():  # this process was suspended or busy: it has not read what nodes sent
            self.attentive_since = now
        for node in list(self._nodes):
            heard_at = max(node.line.heard_at, node.excused_at, self.attentive_since)
            if now > heard_at + self._patience.heartbeat_timeout_s and not self._excuses(node):
                node.line.close()
                self._lose(node)

    def _excuses(self, node: GangNode) -> bool:
        """Return whether the node is silent because its job is suspended, or was at the previous check."""
        # A job that has been resumed since the previous check needs some time until its next heartbeat.
        was_suspended = node.is_suspended
        node.is_suspended = node.job is not None and self._capacity.is_suspended(node.job)
        if was_suspended or node.is_suspended:
            node.excused_at = time.monotonic()
        return was_suspended or node.is_suspended

    def _renew(self) -> None:
        """Start missing agents again, at most once a second, but not for ever if none connects."""
        if self.slots >= self._wanted or time.monotonic() <= self._renewed_at + POLL_S:
            return
        self._renewed_at = time.monotonic()
        if self._has_agents:
            self._capacity.renew(self._missing)
        elif self._starts < MOST_STARTS:
            self._starts += bool(self._capacity.renew(self._missing))
        else:
            self._is_in_vain = self._capacity.has_ended()


@dataclass(frozen=True, kw_only=True)
class GangRequest:
    """The ranks that a driver requests."""

    most: int
    """Largest number of ranks."""
    least: int
    """Smallest number of ranks; with fewer the driver waits."""
    is_here: bool
    """Whether rank 0 is in the driver's own process."""
    settings: Callable[[int], RankSettings]
    """Returns the settings of the ranks for a gang of the given size."""
    hook: Callable[[], None] | None
    """The user's initialization hook."""

    def possible(self, nodes: Nodes) -> int:
        """Return the number of ranks that the nodes have slots for, at most `most`."""
        return min(self.most, nodes.slots)


class InProcess:
    """The driver's own process in the role of a node agent, for rank 0 with use_local.

    It executes the driver's requests when they are sent. `answer` is called with the messages that an agent would send.
    """

    def __init__(self, run: RunFolder, address: tuple[str, int], answer: Callable[[dict[str, Any]], None]) -> None:
        self.worker: RankWorker | None = None
        self._run = run
        self._address = address
        self._answer = answer
        self._buffers = [Buffer(number) for number in range(BUFFERS)]
        self._former: dist.ProcessGroup | None = None
        """The process group of the gang that has ended, kept until the next gang is formed."""

    @property
    def heard_at(self) -> float:
        """time.monotonic() now: this process is never silent."""
        return time.monotonic()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        getattr(self, f"_{head['do']}")(head, body)

    def serve(self) -> None:
        """Run the request that the driver has just sent to all ranks, in the calling thread."""
        if self.worker:
            self.worker.serve_one()

    def close(self) -> None:
        for buffer in self._buffers:
            os.close(buffer.descriptor)
        self._buffers = []

    def _fork(self, head: dict[str, Any], body: bytes) -> None:
        key = derived(self._run.key(), f"generation {head['generation']}")
        self._former = None
        place = {"rank": 0, "local_rank": 0, "size": head["size"], "generation": head["generation"]}
        buffers = [buffer.descriptor for buffer in self._buffers]
        self.worker = RankWorker({**place, "driver": self._address, "key": key.hex(), "buffers": buffers})

    def _end(self, head: dict[str, Any], body: bytes) -> None:
        if self.worker:
            # Destroying a group holds the GIL and waits for gloo's threads, and one of these may wait for the GIL to
            # release the operation that a lost peer has broken. By the next gang those threads have finished.
            self._former = dist.group.WORLD
            self.worker.close()
            self.worker = None
        self._answer({"ended": head["generation"]})

    def _hold(self, head: dict[str, Any], body: bytes) -> None:
        """Write the snapshot to disk at once if it is to be kept: this process has no agent to do it asynchronously."""
        if head["keep"]:
            self._answer(keep(Held.of(Message(head, body), self._buffers), self._run))

    def _leave(self, head: dict[str, Any], body: bytes) -> None:
        self.close()
