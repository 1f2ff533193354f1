"""The driver's end of its node agents: they come, go, and say what happens on their nodes.

The driver's own process may be one of the nodes, and have rank 0.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from hpc_det.checkpoint.snapshots import BUFFERS, Buffer, Held, keep
from hpc_det.node.frames import Message
from hpc_det.node.key import derived
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.network import allow_many_files
from hpc_det.node.process import uninterrupted
from hpc_det.node.suspension import AwakeClock
from hpc_det.sgd.capacity import Capacity
from hpc_det.sgd.driver.failures import NotEnoughRanks
from hpc_det.sgd.elastic.meeting import DriverAddress, Guests, announce, check_free, claim, withdraw
from hpc_det.sgd.rank import RankSettings
from hpc_det.sgd.rank.worker import RankWorker
from hpc_det.store.run_folder import RunFolder

POLL_S = 1.0
"""How often the silent are looked for while something is waited for."""
LOOK_S = 0.05
"""Between two looks at all nodes, at least."""


class NodeLine(Protocol):
    """To an agent, or to what stands for one."""

    @property
    def heard_at(self) -> float:
        """time.monotonic() when it was heard last."""

    def send(self, head: dict[str, Any], body: bytes = b"") -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class GangNode:
    line: NodeLine
    host: str
    slots: int
    job: str | None = None
    is_leaving: bool = False
    """The scheduler has said that it will take the node: nothing new is begun there."""
    is_broken: bool = False
    """No gang can be formed on it: nothing new is begun there before another agent comes."""
    is_suspended: bool = False
    """With its job, when the scheduler was asked last, since the node was silent."""
    excused_at: float = 0.0
    """When its silence was last known to be that of a suspended job."""

    def __str__(self) -> str:
        return self.host


@dataclass(frozen=True, kw_only=True)
class Patience:
    """All in seconds."""

    heartbeat_timeout_s: float = 10.0
    startup_timeout_s: float | None = None
    """None: without end where a queue is waited for, else DEFAULT_START_S."""
    hang_timeout_s: int | None = None


DEFAULT_START_S, LEAVE_S = 100.0, 5.0
TOGETHER_S = 10.0
"""Nodes that start together come one after the other: so long after the least of them the others are waited for."""


class Nodes:
    """One thread calls all methods."""

    def __init__(self, run: RunFolder, capacity: Capacity, patience: Patience) -> None:
        self.on_lost: Callable[[GangNode], None] = lambda node: None
        self.on_said: Callable[[GangNode, dict[str, Any]], None] = lambda node, head: None
        self.on_rank: Callable[[Event], None] = lambda event: None
        self.run = run
        self._nodes: list[GangNode] = []
        self._own: GangNode | None = None
        self._missing: set[str] = set()
        """Hosts whose agents are gone."""
        self._wanted = 0
        self._renewed_at = self.attentive_since = self._next_look = 0.0
        self._clock = AwakeClock(POLL_S)
        self._capacity = capacity
        self._patience = patience
        check_free(run)
        allow_many_files()  # a line for each rank: the usual soft limit of 1,024 would be the most
        self.generation = 0
        """Of the ranks that may call."""
        self._key = run.key()
        self._board = TcpLineServer(capacity.host, self._key_for, Guests(run, capacity.host).are_allowed_from)
        try:
            self._claim = claim(run, DriverAddress(*self.address))
            announce(run, *self.address)
        except BaseException:
            self._board.close()
            raise

    @property
    def address(self) -> tuple[str, int]:
        """Where the driver listens."""
        return self._board.host, self._board.port

    @property
    def slots(self) -> int:
        """Of all nodes that stay and are not broken, in use or not."""
        return sum(node.slots for node in self.staying)

    @property
    def staying(self) -> list[GangNode]:
        return [node for node in self._nodes if not node.is_leaving and not node.is_broken]

    @property
    def are_suspended(self) -> bool:
        """Some of them, with their job, so that no gang can get on."""
        return any(node.excused_at > node.line.heard_at for node in self._nodes)

    @property
    def is_taken(self) -> bool:
        """The scheduler takes all nodes, and this driver, which is on one of them, will see no others."""
        return bool(self._nodes) and all(node.is_leaving for node in self._nodes) and not self._capacity.has_queue

    @property
    def start_s(self) -> float:
        """How long a start may take."""
        if self._patience.startup_timeout_s is not None:
            return self._patience.startup_timeout_s
        return float("inf") if self._capacity.has_queue else DEFAULT_START_S

    def __contains__(self, node: GangNode) -> bool:
        return node in self._nodes

    def start(self, wanted: int) -> None:
        """Agents for so many ranks begin to come, and are started again where they end."""
        self._wanted = wanted
        self._capacity.start(self.run.path, wanted)

    def add(self, node: GangNode) -> None:
        """This process as one, before all others."""
        self._own = node
        self._nodes.insert(0, node)

    def answer(self, do: str, by: Callable[[Any, Message], None]) -> None:
        """From now on such questions of ranks are answered by the thread of the lines."""
        self._board.answers[do] = by

    def await_slots(self, wanted: int, least: int) -> None:
        """Until there are as many as wanted, or at least `least` and nothing more comes.

        Raises NotEnoughRanks with what the capacity says of itself.
        """
        end, enough_since = time.monotonic() + self.start_s, float("inf")
        while self.slots < wanted and time.monotonic() < min(end, enough_since + TOGETHER_S):
            self.hear(min(POLL_S, end - time.monotonic()))
            is_enough = self.slots >= least
            enough_since = min(enough_since, time.monotonic()) if is_enough else float("inf")
        if self.slots < least:
            raise NotEnoughRanks(
                f"{least} ranks are needed at least, and there is room for {self.slots} after {self.start_s:g} s "
                f"(startup_timeout_s); {self._capacity.state()}; the agents' logs: {self.run.logs}"
            )

    def hear(self, within_s: float) -> bool:
        """One thing that has happened, or will within this time; whether something has."""
        try:
            event = self._board.events.get(block=within_s > 0, timeout=max(within_s, 0.0) or None)
        except queue.Empty:
            event = None
        if time.monotonic() >= self._next_look:  # not for each of a thousand beats: a look goes over all nodes
            self._next_look = time.monotonic() + LOOK_S
            self._drop_silent()
            self._renew()
        if event is None:
            return False
        role = event.line.identity["role"]
        if role == "rank":
            self.on_rank(event)
        elif role == "node":  # else a program that asks whether this one still lives
            with uninterrupted():  # a node that arrives does not say so again
                self._hear_node(event)
        return True

    def wait(self, seconds: float) -> None:
        """And hear what happens meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.hear(min(left, POLL_S))

    def close(self) -> None:
        """Nothing is left: no agent, no job, no port."""
        self._wanted = 0  # none that leaves is missed
        for node in self._nodes:
            node.line.send({"do": "leave"})
        end = time.monotonic() + LEAVE_S
        while set(self._nodes) - {self._own} and time.monotonic() < end:
            self.hear(end - time.monotonic())
        try:
            self._capacity.stop()
        finally:
            withdraw(self.run)
            self._claim.withdraw()
            self._board.close()

    def _key_for(self, identity: dict[str, Any]) -> bytes | None:
        """A node's is the run's own, a rank's that of its generation: none that was ended can say anything more."""
        if identity.get("role") in ("node", "driver"):
            return self._key
        is_of_now = identity.get("role") == "rank" and identity.get("generation") == self.generation
        return derived(self._key, f"generation {self.generation}") if is_of_now else None

    def _hear_node(self, event: Event) -> None:
        if event.kind == "arrived":
            identity = event.line.identity
            self._nodes.append(GangNode(event.line, str(identity["host"]), int(identity["slots"]), identity["job"]))
            self._missing.discard(str(identity["host"]))
            return
        for node in [node for node in self._nodes if node.line is event.line]:
            if event.message is None:
                self._lose(node)
            elif "leaving" in event.message.head:
                self._mark_leaving(node)
            else:
                self.on_said(node, event.message.head)

    def _mark_leaving(self, told: GangNode) -> None:
        """Schedulers take whole jobs; PBS tells the first of its nodes alone."""
        for node in self._nodes:
            node.is_leaving |= node is told or (node.job is not None and node.job == told.job)

    def _lose(self, node: GangNode) -> None:
        self._nodes.remove(node)
        self._missing.add(node.host)
        self.on_lost(node)

    def _drop_silent(self) -> None:
        """Not those whom a driver that was stopped, or was busy with something else, has not heard."""
        now = time.monotonic()
        if self._clock.stopped_s():
            self.attentive_since = now
        for node in list(self._nodes):
            heard_at = max(node.line.heard_at, node.excused_at, self.attentive_since)
            if now > heard_at + self._patience.heartbeat_timeout_s and not self._excuses(node):
                node.line.close()
                self._lose(node)

    def _excuses(self, node: GangNode) -> bool:
        """Whether its job is suspended, or was when the scheduler was asked last: then it needs time to be heard."""
        was_suspended = node.is_suspended
        node.is_suspended = node.job is not None and self._capacity.is_suspended(node.job)
        if was_suspended or node.is_suspended:
            node.excused_at = time.monotonic()
        return was_suspended or node.is_suspended

    def _renew(self) -> None:
        if self.slots < self._wanted and time.monotonic() > self._renewed_at + POLL_S:
            self._renewed_at = time.monotonic()
            self._capacity.renew(self._missing)


@dataclass(frozen=True, kw_only=True)
class GangRequest:
    """How many ranks a driver asks for, and what each is to be."""

    most: int
    least: int
    is_here: bool
    """Rank 0 in the driver's own process."""
    settings: Callable[[int], RankSettings]
    """For a gang of so many ranks."""
    hook: Callable[[], None] | None

    def possible(self, nodes: Nodes) -> int:
        """How many of them there is room for."""
        return min(self.most, nodes.slots)


class InProcess:
    """Stands for the line to an agent: what the driver sends is done at once, by this process.

    `answer` is called with what an agent would say.
    """

    def __init__(self, run: RunFolder, address: tuple[str, int], answer: Callable[[dict[str, Any]], None]) -> None:
        self.worker: RankWorker | None = None
        self._run = run
        self._address = address
        self._answer = answer
        self._buffers = [Buffer(number) for number in range(BUFFERS)]
        self._former: dist.ProcessGroup | None = None
        """Of the gang that has ended. What destroys a group has the GIL and waits for gloo's threads, and one of those
        may wait for the GIL, to drop what a lost peer has broken off. Until there is another gang, they have done that.
        """

    @property
    def heard_at(self) -> float:
        return time.monotonic()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        getattr(self, f"_{head['do']}")(head, body)

    def serve(self) -> None:
        """What the driver has just asked of all ranks, by the thread that asks."""
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
            self._former = dist.group.WORLD
            self.worker.close()
            self.worker = None
        self._answer({"ended": head["generation"]})

    def _hold(self, head: dict[str, Any], body: bytes) -> None:
        """Written at once where it is to be durable: here nothing is behind the training."""
        if head["keep"]:
            self._answer(keep(Held.of(Message(head, body), self._buffers), self._run))

    def _leave(self, head: dict[str, Any], body: bytes) -> None:
        self.close()
