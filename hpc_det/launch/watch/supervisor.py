"""Each node agent supervises its part of the gang: nodes are there until they report their exit, are well before ranks
start, and ranks go on stepping afterwards.

Node 0 gathers what all say and gives the verdict, since a node with a dead file system could not write one down. Nobody
waits for anybody but an ill node, for its word to arrive: ranks load their libraries in the meantime. A node that is
lost, or whose agent fails, ends the gang at once; node 0 leaves last.

node -> node 0: {"hello": true}, {"time": ..., "problems": [...]}, then {"ranks": [what heartbeats sent]}; node 0 ->
node: {"ask": "progress" | "stacks"}, and {"noted": true} to an ill one. Both at last: {"exit": EXIT CODE}.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hpc_det.errors import HpcDetError
from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.watch import peers
from hpc_det.launch.watch.hang import HangWatch, HeartbeatServer
from hpc_det.launch.watch.health import ANSWER_S, NodeProblem, problems_of_node, wrong_clocks
from hpc_det.launch.watch.peers import ARRIVE_S, Arrivals, Peers, ToNode0
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.frames import Head
from hpc_det.node.json_files import write_json
from hpc_det.node.lines import NoLine
from hpc_det.node.network import Rendezvous, await_rendezvous, publish
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Failure, note_failure
from hpc_det.store.folders import TrialFolder

SETTLE_S = 1.5
"""Before a node is called lost: where all agents are killed at the same time, none of them is to blame. A suspension
counts as one second of it.
"""
LINGER_S = 60.0
"""How long node 0 stays for others that have not left yet; what ends them then is the scheduler's business."""
EXITS_S = 3.0
"""How long the agents of a gang that has failed may take to leave."""
_STACKS_S = 3.0
"""After this time a rank that has not shown its stacks is forced to."""
_WRITE_S = 1.0
"""What that may take; the verdict kills it."""
_SEND_EVERY_S = 0.5


class UnhealthyNode(HpcDetError):
    """No rank may start here. It is noted already."""


class SupervisedGang(NamedTuple):
    """Whose nodes and ranks are watched."""

    trial: TrialFolder
    plan: JobPlan
    attempt: int
    hosts: Sequence[str]
    """Of its nodes, by rank."""


class Supervisor:
    """One node's part of it."""

    def __init__(
        self, gang: SupervisedGang, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
    ) -> None:
        """`end` ends the attempt on this node, and with it the gang."""
        self.gang = gang
        self.selector = selector
        self.end = end
        self.heartbeats = HeartbeatServer(socket)
        self._clock = AwakeClock()
        """Of all waits: while the job is suspended, nobody can answer."""
        self._force_at = self._report_at = float("inf")

    def rendezvous(self, address: str, folders: NodeFolders) -> Rendezvous:
        """Where the ranks meet; `address` is this node's. Raises UnhealthyNode if this node fails its checks."""
        raise NotImplementedError

    @property
    def awaits_nodes(self) -> bool:
        """Whether this agent must stay for others to come or to leave. Asked when its own ranks are done."""
        return False

    def poll(self) -> None:
        """At least every second."""
        now = self._clock.seconds()
        if now > self._force_at:
            self._force_at, self._report_at = float("inf"), now + _WRITE_S
            self.heartbeats.force_stacks()
        if now > self._report_at:
            self._report_at = float("inf")
            self.heartbeats.report_silent()

    def ask_ranks(self, what: str) -> None:
        if what == "stacks":
            self._force_at = self._clock.seconds() + _STACKS_S
        self.heartbeats.ask(what)

    def report_exit(self, code: int) -> None:
        """To the other agents: the ranks here are done, or are ended, and this agent exits with `code`."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _problems(self, folders: NodeFolders) -> list[NodeProblem]:
        plan = self.gang.plan
        return problems_of_node(self.gang.trial, plan, folders, os.environ) if plan.health_checks else []

    def _note_problems(self, node: int, problems: Iterable[NodeProblem]) -> None:
        """A problem of a folder that all share is the run's failure, and no verdict on the node."""
        problems = list(problems)
        text = "; ".join(problem.text for problem in problems)
        ill = not all(problem.is_shared for problem in problems)
        found = Failure(
            rank=None, host=self.gang.hosts[node], time=time.time(), message=text, unhealthy=ill, disk_full=not ill
        )
        self._note(found)

    def _note(self, failure: Failure) -> None:
        print(f"hpc-det: {failure.sentence()}", file=sys.stderr, flush=True)
        note_failure(self.gang.trial, self.gang.attempt, failure)


class SupervisorOfNode0(Supervisor):
    def __init__(
        self, gang: SupervisedGang, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
    ) -> None:
        super().__init__(gang, selector, socket, end)
        self._peers: Peers | None = None
        self._hang_watch = HangWatch(gang.plan, gang.hosts, self._ask_all, self._clock)
        self._offsets = {0: 0.0}
        """By how many seconds the clock of each node that has arrived is ahead of this one's."""
        self._polled_at = time.monotonic()
        self._arrivals: Arrivals | None = None
        """While nodes are missing."""
        self._done_at: float | None = None
        """When the ranks here were done."""
        self._lost: list[Failure] = []
        self._lost_at = float("inf")

    def rendezvous(self, address: str, folders: NodeFolders) -> Rendezvous:
        """Its own checks come first: where they fail, nobody else needs to come."""
        if found := self._problems(folders):
            self._note_problems(0, found)
            raise UnhealthyNode(found[0].text)
        return self.open(address)

    def open(self, address: str) -> Rendezvous:
        """Listen for the other nodes, and tell them where."""
        plan = self.gang.plan
        if plan.nodes > 1:
            self._peers = Peers(self.selector, address, plan.nodes)
            self._peers.on_message, self._peers.on_exit = self._take_message, self._on_exit
            self._peers.on_lost = self._on_lost
        path = self.gang.trial.rendezvous(self.gang.attempt)
        rendezvous = publish(path, address, self._peers.port if self._peers else 0)
        if self._peers:
            self._peers.secret = rendezvous.secret
        self._arrivals = Arrivals(plan.scheduler, self.gang.hosts)
        return rendezvous

    def poll(self) -> None:
        super().poll()
        if self._peers:
            self._peers.poll()
        if self._arrivals:
            self._await_nodes(self._arrivals)
        if self._clock.seconds() >= self._lost_at:
            self._note_lost()
            self.end()
        self._hang_watch.take(self.heartbeats.news())
        if failure := self._hang_watch.failure():
            note_failure(self.gang.trial, self.gang.attempt, failure)
            self.end()
        self._polled_at = time.monotonic()

    def report_exit(self, code: int) -> None:
        if self._peers:
            self._peers.tell({"exit": code})

    def close(self) -> None:
        """After a failure others may still be there. What becomes of them may tell the cause of it."""
        if self._peers:
            self._peers.await_exits(EXITS_S)
            self._note_lost()
            self._peers.close()

    @property
    def awaits_nodes(self) -> bool:
        if self._arrivals or self._lost:
            return True
        now = self._clock.seconds()
        self._done_at = now if self._done_at is None else self._done_at
        return bool(self._peers and self._peers.present and now < self._done_at + LINGER_S)

    def _take_message(self, node: int, message: Head) -> None:
        if "problems" in message:
            self._welcome(node, message)
        self._hang_watch.take(message.get("ranks", ()))

    def _welcome(self, node: int, report: Head) -> None:
        self._offsets[node] = self._offset(report["time"])
        if report["problems"]:
            self._note_problems(node, [NodeProblem(*problem) for problem in report["problems"]])
            if self._peers:
                self._peers.tell({"noted": True}, node)
            self.end()

    def _offset(self, node_time: float) -> float:
        """No clock is behind for what has lain here unread, as while this process was suspended."""
        offset, unread_s = node_time - time.time(), time.monotonic() - self._polled_at
        return offset if offset > 0 else min(offset + unread_s, 0.0)

    def _on_exit(self, node: int, code: int) -> None:
        """With another code than 0 it has noted why, and the gang cannot go on."""
        if code:
            self.end()

    def _on_lost(self, node: int, why: str) -> None:
        host = self.gang.hosts[node]
        self._lost.append(Failure(rank=None, host=host, time=time.time(), message=f"lost: {why}", node_lost=True))
        self._lost_at = min(self._lost_at, self._clock.seconds() + SETTLE_S)

    def _note_lost(self) -> None:
        for failure in self._lost:
            self._note(failure)
        self._lost, self._lost_at = [], float("inf")

    def _await_nodes(self, arrivals: Arrivals) -> None:
        missing = [node for node in range(self.gang.plan.nodes) if node not in self._offsets]
        if not missing:
            self._arrivals = None
            write_json(self.gang.trial.nodes(self.gang.attempt), list(self.gang.hosts))
            self._check_clocks()
        for node in arrivals.down(missing):
            self._on_lost(node, f"{self.gang.plan.scheduler} says that it is down, and its agent has not come")
        if arrivals.are_late and self.gang.plan.health_checks:
            for node in missing:
                self._note_problems(node, [NodeProblem(f"its agent did not report within {ARRIVE_S:.0f} s")])
            self.end()

    def _check_clocks(self) -> None:
        if not self.gang.plan.health_checks:
            return
        by_host = {self.gang.hosts[node]: offset for node, offset in sorted(self._offsets.items())}
        wrong = wrong_clocks(by_host)
        for host, problem in wrong.items():
            self._note_problems(list(self.gang.hosts).index(host), [problem])
        if wrong:
            self.end()

    def _ask_all(self, what: str) -> None:
        self.ask_ranks(what)
        if self._peers:
            self._peers.tell({"ask": what})


class SupervisorOfOtherNode(Supervisor):
    def __init__(
        self,
        gang: SupervisedGang,
        selector: selectors.BaseSelector,
        socket: AgentSocket,
        end: Callable[[], None],
        node: int,
    ) -> None:
        super().__init__(gang, selector, socket, end)
        self._node = node
        self._node_0: ToNode0 | None = None
        self._has_lost_node_0 = False
        self._send_at = 0.0

    def rendezvous(self, address: str, folders: NodeFolders) -> Rendezvous:
        """The line comes first: what is lost during the checks was there."""
        rendezvous = await_rendezvous(self.gang.trial.rendezvous(self.gang.attempt))
        try:
            self._node_0 = ToNode0(self.selector, rendezvous, self._node, ANSWER_S)
        except NoLine as error:
            self._cannot_reach(rendezvous, error.error)
        else:
            self._node_0.on_message = self._obey
            self._node_0.on_exit = self._on_exit
            self._node_0.on_lost = self._on_lost
        found = self._problems(folders)
        if self._node_0:
            self._node_0.tell({"time": time.time(), "problems": found})
        if found:
            self._leave(found)
        return rendezvous

    def poll(self) -> None:
        super().poll()
        now = self._clock.seconds()
        if self._node_0 and now >= self._send_at and (news := self.heartbeats.news()):
            self._send_at = now + _SEND_EVERY_S
            self._node_0.tell({"ranks": news})

    def report_exit(self, code: int) -> None:
        if self._node_0:
            self._node_0.close(code)

    def close(self) -> None:
        """Where node 0 was lost it has lost this node, too, perhaps a little later. The exit code of this agent must
        not have it ended before it has said so.
        """
        if self._has_lost_node_0:
            time.sleep(peers.LOST_S * 2 / 3)

    def _obey(self, message: Head) -> None:
        if "ask" in message:
            self.ask_ranks(message["ask"])

    def _on_exit(self, code: int) -> None:
        if code:
            self.end()

    def _on_lost(self, why: str) -> None:
        """Nobody is left to give a verdict: on node 0 the job has ended, or will hear of this one."""
        self._has_lost_node_0 = True
        print(f"hpc-det: node {self.gang.hosts[0]} lost: {why}; the ranks here are ended", file=sys.stderr, flush=True)
        self.end()

    def _cannot_reach(self, rendezvous: Rendezvous, error: OSError) -> None:
        where = f"{self.gang.hosts[0]} at {rendezvous.host}:{rendezvous.agents_port}"
        if isinstance(error, ConnectionRefusedError):  # the way is there, and the agent not any more
            raise HpcDetError(f"the agent of the first node, {where}, is gone")
        if self.gang.plan.health_checks:
            self._note_problems(
                self._node, [NodeProblem(f"cannot connect to the first node, {where}: {error.strerror or error}")]
            )
            raise UnhealthyNode("cannot connect to the first node")

    def _leave(self, found: list[NodeProblem]) -> None:
        """Not before node 0 knows why."""
        if self._node_0 is None or not self._node_0.answered():
            self._note_problems(self._node, found)
        raise UnhealthyNode(found[0].text)


def supervisor_of_node(
    gang: SupervisedGang, node: int, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
) -> Supervisor:
    """The part of node `node`; `end` ends the attempt on this node, and with it the gang."""
    if node == 0:
        return SupervisorOfNode0(gang, selector, socket, end)
    return SupervisorOfOtherNode(gang, selector, socket, end, node)
