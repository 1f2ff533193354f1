"""The gang: ranks that are formed on the nodes, called together, watched during a call, and ended together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

from hpc_det.errors import count
from hpc_det.launch.log_tail import how_it_ended
from hpc_det.launch.watch.hang import HangJudge, last_first, sentence
from hpc_det.node.heartbeat import Progress
from hpc_det.node.line_server import Event
from hpc_det.node.lines import Line
from hpc_det.node.suspension import AwakeClock
from hpc_det.sgd.driver.failures import COLLATERAL_S, Hung, NodeLost, NotConnected, Preempted, Raised, RankDied, root_of
from hpc_det.sgd.driver.nodes import POLL_S, GangNode, InProcess, Nodes
from hpc_det.sgd.elastic.wait_report import WaitReport
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank.store import StoreKeeper
from hpc_det.sgd.rank.worker import show

LAST_REPORT_S = 2.0
"""Seconds to wait, after the connection of a rank has ended, until its agent has reported the exit code or the agent's
connection has ended too. Both take milliseconds, except on a busy node.
"""
JOIN_S, END_S, LEAVE_S = 60.0, 15.0, 5.0
"""Seconds to wait for new ranks to connect, for killed ranks to be reported, and for ranks to exit on request."""
STACKS_S = 2.0
"""Seconds to wait for the ranks of a hung gang to report their stacks."""
RANK_SILENT_S = 600.0
"""Seconds without an answer after which a rank counts as dead. The thread that reads its connection answers within
milliseconds, but not while a C call holds the interpreter's lock: unpickling a large data set takes minutes.
"""


@dataclass(eq=False)
class Rank:
    """The driver's view of a rank."""

    number: int
    node: GangNode
    line: Line | None = None
    """The connection to the rank; None until it has connected."""
    pid: int | None = None
    code: int | None = None
    """Exit code, negative for a signal; None until the agent has reported it."""
    has_left: bool = False
    """Whether it was asked to exit, so that its exit is not a failure."""

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a message to the rank, which must have connected."""
        assert self.line, "this rank has not connected yet"
        self.line.send(head, body)

    def __str__(self) -> str:
        process = "not started yet" if self.pid is None else f"process {self.pid}"
        return f"rank {self.number} on {self.node} ({process})"


def spread(nodes: Sequence[GangNode], size: int) -> list[tuple[GangNode, int]]:
    """Return the node and the local rank of each rank: evenly spread over the nodes, consecutive ranks on a node."""
    # Evenly, because RaySGD distributes its workers so (placement strategy SPREAD).
    by_turns = [(local, place) for place, node in enumerate(nodes) for local in range(node.slots)]
    taken = sorted(by_turns)[:size]
    return [(nodes[place], local) for place, local in sorted((place, local) for local, place in taken)]


class Watch:
    """The detection of hung and silent ranks while a call is in progress."""

    def __init__(self, ranks: Sequence[Rank], nodes: Nodes, hang_timeout_s: int | None) -> None:
        self._ranks = ranks
        self._nodes = nodes
        self._judge = HangJudge(len(ranks), hang_timeout_s)
        self._clock = AwakeClock(POLL_S)
        self._places: dict[int, str] = {}
        """By rank, the code location of its main thread, from the answers to "stacks"."""
        self._asked: set[int] = set()
        """Ranks that have not answered the last progress request."""
        self._asked_at = self._next_look = 0.0
        self._pause: WaitReport | None = None
        """The report that ranks are suspended; None if they are not."""

    def begin(self) -> None:
        """Start watching: a call begins now."""
        self._asked_at = time.monotonic()
        self._next_look = self._asked_at + POLL_S

    @property
    def rest_s(self) -> float:
        """Seconds until the next check; negative if it is overdue."""
        return self._next_look - time.monotonic()

    def hears(self, rank: int, head: dict[str, Any]) -> None:
        """Record a rank's answer to a "progress" or "stacks" request."""
        self._asked.discard(rank)
        self._judge.take(rank, Progress(*head["progress"]))
        if "at" in head:
            self._places[rank] = head["at"]

    def look(self) -> None:
        """Check the ranks if it is time, and request their progress.

        Raises RankDied for a rank that does not answer, and Hung if the gang makes no progress.
        """
        if self.rest_s > 0:
            return
        self._next_look = time.monotonic() + min(POLL_S, self._judge.round_s)
        if self._nodes.are_suspended:  # suspended ranks cannot answer; give them the full time once they continue
            self._asked_at = time.monotonic()
            self._pause = self._pause or WaitReport(lambda: f"ranks make no progress{self._nodes.suspended_jobs()}")
            self._pause.look()
            return
        self._pause = None
        asked_since = max(self._asked_at, self._nodes.attentive_since)
        for rank in self._ranks:
            if rank.number not in self._asked:  # else requests would pile up for a rank that does not read them
                rank.send({"do": "progress"})
                self._asked.add(rank.number)
            if rank.line and time.monotonic() > max(rank.line.heard_at, asked_since) + RANK_SILENT_S:
                log = self._nodes.run.rank_log(self._nodes.generation, rank.number)
                raise RankDied(f"{rank} has not answered for {RANK_SILENT_S:g} s (stopped?); see its log {log}")
        if self._judge.is_hung(self._clock.seconds()):
            raise Hung(f"{self._where_they_stand()} ({self._nodes.run.logs})")

    def _where_they_stand(self) -> str:
        """Have the ranks write their stacks to their logs; return a text with progress and code location of each."""
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
    """The call in progress, and the answers of ranks to it."""

    number: int
    results: dict[int, Any] = field(default_factory=dict)
    """The result of each rank that has finished the call, by its number."""
    errors: list[Raised] = field(default_factory=list)
    lost: list[Rank] = field(default_factory=list)
    """Ranks of this generation that exited or whose node was lost, in this call or before it."""
    first_trouble: float = 0.0
    """time.monotonic() of the first error or loss; 0 if there is none."""


class RankGang:
    """The ranks of the current generation.

    All methods are called by one thread, and may raise GangLost: then call `end`, and `form` a new gang.
    """

    def __init__(self, nodes: Nodes, hang_timeout_s: int | None) -> None:
        self.nodes = nodes
        self.ranks: list[Rank] = []
        self.on_kept: Callable[[dict[str, Any]], None] = lambda message: None
        """Called with an agent's message that it has written a snapshot to disk, or failed to."""
        self.on_report: Callable[[int, dict[str, Any]], None] = lambda rank, head: None
        """Called with a rank's number and its report, from a training loop of `fit`."""
        self._hang_timeout_s = hang_timeout_s
        self._numbers = itertools.count()
        self._call = _Call(-1)
        self._ended_on: set[GangNode] = set()
        """Nodes that have reported the end of all their ranks of this generation."""
        self._own: InProcess | None = None
        """This process in the role of a node, if rank 0 is in it."""
        nodes.on_lost, nodes.on_said, nodes.on_rank = self._node_lost, self._node_said, self._rank_event

    @property
    def size(self) -> int:
        """The number of ranks; 0 if no gang is formed."""
        return len(self.ranks)

    @property
    def is_broken(self) -> bool:
        """True if a rank has been lost."""
        return bool(self._call.lost)

    def live_here(self) -> None:
        """Make this process the first node, with one slot, so that rank 0 of each gang is in it."""
        self._own = InProcess(self.nodes.run, self.nodes.address, lambda head: self._node_said(node, head))
        node = GangNode(self._own, "the driver's host", 1)
        self.nodes.add(node)

    @property
    def local_operator(self) -> TrainingOperator | None:
        """The operator of the rank in this process, or None."""
        return self._own.worker.runner.operator if self._own and self._own.worker else None

    def form(self, size: int, first: GangNode | None = None) -> None:
        """Start a new generation of `size` ranks, and wait until they have connected; `first`: the node of rank 0.

        Raises RankDied if a rank does not connect within JOIN_S seconds, or another GangLost.
        """
        self.nodes.generation += 1
        # A new store for each generation: in the old one, ranks would find the addresses of the gang before.
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
        """Wait until all ranks have connected."""
        end = time.monotonic() + JOIN_S
        with self.nodes.reported(self._connecting):
            while missing := self._missing():
                self.nodes.hear(POLL_S)
                self._raise_losses()
                if self.nodes.are_suspended:  # suspended ranks cannot connect: full time for them once they continue
                    end = time.monotonic() + JOIN_S
                if time.monotonic() > end:
                    problem = f"{missing[0]} did not connect within {JOIN_S:g} s; see {self.log(missing[0].number)}"
                    raise RankDied(problem, missing[0].node)

    def _missing(self) -> list[Rank]:
        """Return the ranks that have not connected yet."""
        return [rank for rank in self.ranks if not rank.line]

    def _connecting(self) -> str:
        """Return how many ranks have connected, and the first one that has not, as text."""
        missing = self._missing()
        first = "".join(f"; {rank} has not, see {self.log(rank.number)}" for rank in missing[:1])
        connected = self.size - len(missing)
        verb = "has" if connected == 1 else "have"
        return f"{connected} of {count(self.size, 'rank')} {verb} connected{first}{self.nodes.suspended_jobs()}"

    def call(self, do: str, *arguments: Any) -> list[Any]:
        """Call a method of RankWorker on all ranks, and return the results in rank order."""
        body = cloudpickle.dumps(arguments)
        return self.call_each(do, [body] * self.size)

    def call_each(self, do: str, bodies: Sequence[bytes]) -> list[Any]:
        """Call a method of RankWorker with different arguments on each rank: `bodies` are the pickled arguments.

        Raises the exception of a rank, or GangLost.
        """
        # Ranks that were lost between two calls fail this call, too.
        self._call = call = _Call(next(self._numbers), lost=self._call.lost)
        for rank, body in zip(self.ranks, bodies, strict=True):
            rank.send({"do": do, "id": call.number}, body)
        if self._own:  # rank 0 in this process computes here, while the other ranks compute in theirs
            self._own.serve()
        self._watch.begin()
        while len(call.results) < self.size:
            self.nodes.hear(self._watch.rest_s)
            self._raise_losses()
            self._raise_errors()
            self._watch.look()
        return [call.results[rank] for rank in range(self.size)]

    def end(self) -> None:
        """Kill all ranks of this generation, and wait up to END_S seconds until the agents have reported their end."""
        involved = [node for node in {rank.node for rank in self.ranks} if node in self.nodes]
        self._ended_on = set()
        for node in involved:
            node.line.send({"do": "end", "generation": self.nodes.generation})
        self.ranks = []
        end = time.monotonic() + END_S

        def owing() -> list[str]:
            return [str(node) for node in involved if node in self.nodes and node not in self._ended_on]

        with self.nodes.reported(lambda: f"the ranks have to end on {', '.join(owing())}"):
            while owing() and time.monotonic() < end:
                self.nodes.hear(POLL_S)

    def leave(self) -> None:
        """Ask the ranks to destroy their process group and exit; kill those that have not after LEAVE_S seconds."""
        # Rank 0 in this process cannot exit; `end` closes it.
        leaving = [rank for rank in self.ranks if rank.line and rank.node.line is not self._own]
        for rank in leaving:
            rank.has_left = True
            rank.send({"do": "leave"})
        end = time.monotonic() + LEAVE_S
        while any(rank.code is None and rank.node in self.nodes for rank in leaving) and time.monotonic() < end:
            self.nodes.hear(POLL_S)
        self.end()

    def poll(self) -> None:
        """Handle the messages that have arrived, without waiting."""
        while self.nodes.hear(0.0):
            pass

    def _node_lost(self, node: GangNode) -> None:
        self._lose(*[rank for rank in self.ranks if rank.node is node])

    def _node_said(self, node: GangNode, head: dict[str, Any]) -> None:
        """Handle an agent's message; reports about ranks of an earlier generation are ignored."""
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
        # Messages of an earlier generation may arrive late.
        if identity["generation"] == self.nodes.generation and identity["rank"] < self.size:
            getattr(self, f"_rank_{event.kind}")(self.ranks[identity["rank"]], event)

    def _rank_arrived(self, rank: Rank, event: Event) -> None:
        rank.line, rank.pid = event.line, event.line.identity["pid"]

    def _rank_gone(self, rank: Rank, event: Event) -> None:
        if rank.line is event.line:  # else the end of an earlier attempt to connect
            self._lose(rank)

    def _rank_said(self, rank: Rank, event: Event) -> None:
        """Handle a rank's message; answers to an earlier call are ignored."""
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
        """Record the ranks as lost, except those that were asked to exit."""
        for rank in ranks:
            if not rank.has_left and rank not in self._call.lost:
                self._trouble()
                self._call.lost.append(rank)

    def _trouble(self) -> None:
        """Note the time of the first error or loss."""
        self._call.first_trouble = self._call.first_trouble or time.monotonic()

    def _raise_losses(self) -> None:
        """Raise the GangLost that describes the lost ranks, if there are any."""
        if not self._call.lost:
            return
        # Losses come before errors: the exit of a rank causes the exceptions of its peers.
        end = time.monotonic() + LAST_REPORT_S
        while (left := end - time.monotonic()) > 0 and any(self._owes_a_report(rank) for rank in self._call.lost):
            self.nodes.hear(left)
        lost = self._call.lost
        gone = [rank for rank in lost if rank.node not in self.nodes]
        for rank in lost:
            if rank.node.is_leaving:
                raise Preempted(f"{rank.node} was taken by the scheduler")
        if gone:
            raise NodeLost(f"{gone[0].node} was lost with rank {', '.join(str(rank.number) for rank in gone)}")
        # A rank that exited on its own may have done so because another one was killed: name the killed one.
        first = min(lost, key=lambda rank: (rank.code is None or rank.code >= 0, rank.number))
        log = self.log(first.number)
        if not log.exists():  # the rank was never forked
            log = self.nodes.run.node_log(first.node.host)
        how = "its connection ended" if first.code is None else how_it_ended(first.code, log, 0)
        raise RankDied(f"{first}: {how}", first.node)

    def _owes_a_report(self, rank: Rank) -> bool:
        """Return whether the agent has still to report the rank's exit code."""
        return rank.code is None and rank.node in self.nodes

    def _raise_errors(self) -> None:
        """Raise the exception of a rank, if there is one.

        An exception that a peer's exit may have caused is held back for COLLATERAL_S seconds after the first problem,
        so that the exit is raised instead if it is reported meanwhile.
        """
        errors = self._call.errors
        if not errors:
            return
        root = root_of(errors)
        if root.may_be_of_a_peer and time.monotonic() < self._call.first_trouble + COLLATERAL_S:
            return
        error = root.error(self.log(root.rank))
        if root.is_of_the_gang:
            raise NotConnected(
                f"{self.ranks[root.rank]}: communication failed although no rank has exited: {root.said}; see its log "
                f"{self.log(root.rank)}"
            ) from error
        raise error

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log."""
        return self.nodes.run.rank_log(self.nodes.generation, rank)
