"""The gang: ranks that are formed over nodes, asked together, watched meanwhile, and ended together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from hpc_det.launch.log_tail import how_it_ended
from hpc_det.launch.watch.hang import HangJudge, last_first, sentence
from hpc_det.node.heartbeat import Progress
from hpc_det.node.line_server import Event
from hpc_det.node.lines import Line
from hpc_det.node.suspension import AwakeClock
from hpc_det.sgd.driver.failures import COLLATERAL_S, Hung, NodeLost, NotConnected, Preempted, Raised, RankDied, root_of
from hpc_det.sgd.driver.nodes import POLL_S, GangNode, InProcess, Nodes
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank.store import StoreKeeper
from hpc_det.sgd.rank.worker import show

LAST_REPORT_S = 2.0
"""After a rank's line has ended: for its agent to say how it ended, or for the end of the agent's line, too. Both come
within milliseconds, but on a busy node.
"""
JOIN_S, END_S, LEAVE_S = 60.0, 15.0, 5.0
STACKS_S = 2.0
"""How long the ranks of a gang that hangs may take to show where they stand."""
RANK_SILENT_S = 600.0
"""A rank's second thread answers within milliseconds, but not while a C call keeps the interpreter's lock: to unpickle
a large data set takes minutes."""


@dataclass(eq=False)
class Rank:
    number: int
    node: GangNode
    line: Line | None = None
    pid: int | None = None
    code: int | None = None
    has_left: bool = False

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        assert self.line, "it has not arrived yet"
        self.line.send(head, body)

    def __str__(self) -> str:
        return f"rank {self.number} on {self.node} (process {self.pid})"


def spread(nodes: Sequence[GangNode], size: int) -> list[tuple[GangNode, int]]:
    """Node and local rank of each rank: evenly over the nodes, as RaySGD has it, and a node's ranks in a row."""
    by_turns = [(local, place) for place, node in enumerate(nodes) for local in range(node.slots)]
    taken = sorted(by_turns)[:size]
    return [(nodes[place], local) for place, local in sorted((place, local) for local, place in taken)]


class Watch:
    """Over the ranks of a generation, while something is asked of them."""

    def __init__(self, ranks: Sequence[Rank], nodes: Nodes, hang_timeout_s: int | None) -> None:
        self._ranks = ranks
        self._nodes = nodes
        self._judge = HangJudge(len(ranks), hang_timeout_s)
        self._clock = AwakeClock(POLL_S)
        self._places: dict[int, str] = {}
        self._asked: set[int] = set()
        """Ranks that owe an answer."""
        self._asked_at = self._next_look = 0.0

    def begin(self) -> None:
        """Something is asked now."""
        self._asked_at = time.monotonic()
        self._next_look = self._asked_at + POLL_S

    @property
    def rest_s(self) -> float:
        """How long to wait until the next look."""
        return self._next_look - time.monotonic()

    def hears(self, rank: int, head: dict[str, Any]) -> None:
        """What it says when it is looked at."""
        self._asked.discard(rank)
        self._judge.take(rank, Progress(*head["progress"]))
        if "at" in head:
            self._places[rank] = head["at"]

    def look(self) -> None:
        """If it is time. Raises RankDied for a rank that does not answer, and Hung where none gets on."""
        if self.rest_s > 0:
            return
        self._next_look = time.monotonic() + min(POLL_S, self._judge.round_s)
        if self._nodes.are_suspended:
            self._asked_at = time.monotonic()
            return
        asked_since = max(self._asked_at, self._nodes.attentive_since)
        for rank in self._ranks:
            if rank.number not in self._asked:  # what a suspended rank does not read would pile up
                rank.send({"do": "progress"})
                self._asked.add(rank.number)
            if rank.line and time.monotonic() > max(rank.line.heard_at, asked_since) + RANK_SILENT_S:
                log = self._nodes.run.rank_log(self._nodes.generation, rank.number)
                raise RankDied(f"{rank} has not answered for {RANK_SILENT_S:g} s (stopped?); its log: {log}")
        if self._judge.is_hung(self._clock.seconds()):
            raise Hung(f"{self._where_they_stand()} ({self._nodes.run.logs})")

    def _where_they_stand(self) -> str:
        self._places.clear()
        for rank in self._ranks:
            rank.send({"do": "stacks"})
        end = time.monotonic() + STACKS_S
        while len(self._places) < len(self._ranks) and time.monotonic() < end:
            self._nodes.hear(POLL_S)
        standing = {
            rank: (progress, self._places.get(rank, "no answer")) for rank, progress in self._judge.ranks.items()
        }
        return sentence(self._judge.still_s, last_first(standing))


@dataclass
class _Call:
    """What is asked of all ranks now, and what came of it."""

    number: int
    results: dict[int, Any] = field(default_factory=dict)
    errors: list[Raised] = field(default_factory=list)
    lost: list[Rank] = field(default_factory=list)
    first_trouble: float = 0.0


class RankGang:
    """Every method is called by one thread, and may raise GangLost: then `end` it, and `form` another."""

    def __init__(self, nodes: Nodes, hang_timeout_s: int | None) -> None:
        self.nodes = nodes
        self.ranks: list[Rank] = []
        self.on_kept: Callable[[dict[str, Any]], None] = lambda message: None
        self.on_report: Callable[[int, dict[str, Any]], None] = lambda rank, head: None
        self._hang_timeout_s = hang_timeout_s
        self._numbers = itertools.count()
        self._call = _Call(-1)
        self._ended_on: set[GangNode] = set()
        self._own: InProcess | None = None
        nodes.on_lost, nodes.on_said, nodes.on_rank = self._node_lost, self._node_said, self._rank_event

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """Whether a rank is gone already."""
        return bool(self._call.lost)

    def live_here(self) -> None:
        """Rank 0 is in this process from now on."""
        self._own = InProcess(self.nodes.run, self.nodes.address, lambda head: self._node_said(node, head))
        node = GangNode(self._own, "the driver's host", 1)
        self.nodes.add(node)

    @property
    def local_operator(self) -> TrainingOperator | None:
        return self._own.worker.runner.operator if self._own and self._own.worker else None

    def form(self, size: int, first: GangNode | None = None) -> None:
        """A new generation of `size` ranks, rank 0 on the node `first` if that matters."""
        self.nodes.generation += 1
        self.nodes.answer("store", StoreKeeper(self.nodes.generation).answer)
        nodes = sorted(self.nodes.staying, key=lambda node: node is not first)
        slots = spread(nodes, size)
        self.ranks = [Rank(number, node) for number, (node, _) in enumerate(slots)]
        self._call = _Call(-1)
        self._watch = Watch(self.ranks, self.nodes, self._hang_timeout_s)
        for node in nodes:
            placed = [[number, local] for number, (its, local) in enumerate(slots) if its is node]
            if placed:
                node.line.send({"do": "fork", "generation": self.nodes.generation, "size": size, "ranks": placed})
        self._await_ranks()

    def _await_ranks(self) -> None:
        end = time.monotonic() + JOIN_S
        while missing := [rank for rank in self.ranks if not rank.line]:
            self.nodes.hear(POLL_S)
            self._raise_losses()
            if self.nodes.are_suspended:
                end = time.monotonic() + JOIN_S
            if time.monotonic() > end:
                problem = f"{missing[0]} did not come within {JOIN_S:g} s; {self.log(missing[0].number)}"
                raise RankDied(problem, missing[0].node)

    def call(self, do: str, *arguments: Any) -> list[Any]:
        """What each rank made of it, in rank order."""
        body = cloudpickle.dumps(arguments)
        return self.call_each(do, [body] * self.size)

    def call_each(self, do: str, bodies: Sequence[bytes]) -> list[Any]:
        """The same with arguments of its own for each rank, pickled."""
        self._call = call = _Call(next(self._numbers), lost=self._call.lost)
        for rank, body in zip(self.ranks, bodies, strict=True):
            rank.send({"do": do, "id": call.number}, body)
        if self._own:
            self._own.serve()
        self._watch.begin()
        while len(call.results) < self.size:
            self.nodes.hear(self._watch.rest_s)
            self._raise_losses()
            self._raise_errors()
            self._watch.look()
        return [call.results[rank] for rank in range(self.size)]

    def end(self) -> None:
        """KILL all ranks of this generation, and wait until their slots are free."""
        involved = [node for node in {rank.node for rank in self.ranks} if node in self.nodes]
        self._ended_on = set()
        for node in involved:
            node.line.send({"do": "end", "generation": self.nodes.generation})
        self.ranks = []
        end = time.monotonic() + END_S
        while any(node in self.nodes and node not in self._ended_on for node in involved) and time.monotonic() < end:
            self.nodes.hear(POLL_S)

    def leave(self) -> None:
        """The ranks end their process group and leave by themselves, if they can in time."""
        leaving = [rank for rank in self.ranks if rank.line and rank.node.line is not self._own]
        for rank in leaving:
            rank.has_left = True
            rank.send({"do": "leave"})
        end = time.monotonic() + LEAVE_S
        while any(rank.code is None and rank.node in self.nodes for rank in leaving) and time.monotonic() < end:
            self.nodes.hear(POLL_S)
        self.end()

    def poll(self) -> None:
        """Hear what has come, without waiting."""
        while self.nodes.hear(0.0):
            pass

    def _node_lost(self, node: GangNode) -> None:
        self._lose(*[rank for rank in self.ranks if rank.node is node])

    def _node_said(self, node: GangNode, head: dict[str, Any]) -> None:
        if "exited" in head and head["generation"] == self.nodes.generation and head["exited"] < self.size:
            rank = self.ranks[head["exited"]]
            rank.code = head["code"]
            self._lose(rank)
        elif head.get("ended") == self.nodes.generation:
            self._ended_on.add(node)
        elif "kept" in head:
            self.on_kept(head)

    def _rank_event(self, event: Event) -> None:
        identity = event.line.identity
        if identity["generation"] == self.nodes.generation and identity["rank"] < self.size:
            getattr(self, f"_rank_{event.kind}")(self.ranks[identity["rank"]], event)

    def _rank_arrived(self, rank: Rank, event: Event) -> None:
        rank.line, rank.pid = event.line, event.line.identity["pid"]

    def _rank_gone(self, rank: Rank, event: Event) -> None:
        if rank.line is event.line:  # else its first try to connect
            self._lose(rank)

    def _rank_said(self, rank: Rank, event: Event) -> None:
        assert event.message
        head, body = event.message
        if head.get("done") == self._call.number:
            self._call.results[rank.number] = cloudpickle.loads(body)
        elif head.get("raised") == self._call.number:
            self._trouble()
            self._call.errors.append(Raised(rank.number, *cloudpickle.loads(body)))
        elif "progress" in head:
            self._watch.hears(rank.number, head)
        elif "shown" in head:
            show(head["shown"], body)
        elif "report" in head:
            self.on_report(rank.number, head)

    def _lose(self, *ranks: Rank) -> None:
        for rank in ranks:
            if not rank.has_left and rank not in self._call.lost:
                self._trouble()
                self._call.lost.append(rank)

    def _trouble(self) -> None:
        self._call.first_trouble = self._call.first_trouble or time.monotonic()

    def _raise_losses(self) -> None:
        """A rank that is gone is the cause of all that its peers say."""
        if not self._call.lost:
            return
        end = time.monotonic() + LAST_REPORT_S
        while (left := end - time.monotonic()) > 0 and any(self._owes_a_report(rank) for rank in self._call.lost):
            self.nodes.hear(left)
        lost = self._call.lost
        gone = [rank for rank in lost if rank.node not in self.nodes]
        for rank in lost:
            if rank.node.is_leaving:
                raise Preempted(f"{rank.node} was taken by the scheduler")
        if gone:
            raise NodeLost(f"{gone[0].node} is lost, and with it rank {', '.join(str(rank.number) for rank in gone)}")
        # A rank that left by itself may have left because of one that was killed.
        first = min(lost, key=lambda rank: (rank.code is None or rank.code >= 0, rank.number))
        log = self.log(first.number)
        if not log.exists():  # it was never forked
            log = self.nodes.run.node_log(first.node.host)
        how = "its line ended" if first.code is None else how_it_ended(first.code, log, 0)
        raise RankDied(f"{first}: {how}", first.node)

    def _owes_a_report(self, rank: Rank) -> bool:
        """Its agent has not said yet how it ended."""
        return rank.code is None and rank.node in self.nodes

    def _raise_errors(self) -> None:
        """An error that a peer's end may have caused waits for that news."""
        errors = self._call.errors
        if not errors:
            return
        root = root_of(errors)
        if root.may_be_of_a_peer and time.monotonic() < self._call.first_trouble + COLLATERAL_S:
            return
        error = root.error(self.log(root.rank))
        if root.is_of_the_gang:
            raise NotConnected(
                f"{self.ranks[root.rank]}: no rank is gone, and yet: {root.said}; its log: {self.log(root.rank)}"
            ) from error
        raise error

    def log(self, rank: int) -> Path:
        return self.nodes.run.rank_log(self.nodes.generation, rank)
