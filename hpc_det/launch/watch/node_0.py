"""The supervision on node 0, which collects the reports of all nodes and decides about the gang."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.watch.hang import HangWatch
from hpc_det.launch.watch.health import NodeProblem, wrong_clocks
from hpc_det.launch.watch.live_progress import LiveProgress
from hpc_det.launch.watch.peers import ARRIVE_S, Arrivals, Peers
from hpc_det.launch.watch.supervisor import SupervisedGang, Supervisor, UnhealthyNode
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.frames import Head
from hpc_det.node.json_files import write_json
from hpc_det.node.network import Rendezvous, publish
from hpc_det.store.attempt import Failure, note_failure

SETTLE_S = 1.5
"""Seconds from the end of a connection until its node counts as lost.

If all agents are killed at about the same time, this one dies before that, so no node is blamed. A suspension counts as
one second (`AwakeClock`).
"""
LINGER_S = 60.0
"""Seconds that node 0 waits for the other agents after its own ranks; then it exits, and the scheduler ends them."""
EXITS_S = 3.0
"""Seconds for the agents of a failed gang to exit."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks for nodes that have not connected."""


class SupervisorOfNode0(Supervisor):
    """The supervision on node 0, which decides about the gang."""

    def __init__(
        self, gang: SupervisedGang, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
    ) -> None:
        super().__init__(gang, selector, socket, end)
        self._peers: Peers | None = None
        self._hang_watch = HangWatch(gang.plan, gang.hosts, self._ask_all, self._clock)
        self._live_progress = LiveProgress(gang.trial, gang.attempt)
        self._offsets = {0: 0.0}
        """Seconds by which the clock of each node that has reported is ahead of this node's, keyed by node rank."""
        self._polled_at = time.monotonic()
        """Monotonic time of the last poll."""
        self._ready = set[int]()
        """The nodes that are ready to start their ranks."""
        self._arrivals: Arrivals | None = None
        """None once all nodes have reported."""
        self._look_at = 0.0
        """Seconds on the clock of the next look for missing nodes."""
        self._done_at: float | None = None
        """Seconds on the clock when the ranks of this node were done."""
        self._lost: list[Failure] = []
        """Lost nodes that are not noted yet."""
        self._lost_at = float("inf")
        """Seconds on the clock when they are noted; infinity if there are none."""

    def rendezvous(self, address: str, folders: NodeFolders) -> Rendezvous:
        """Run the health checks and publish the rendezvous."""
        # Before publishing: if node 0 fails its checks, the other nodes need not connect.
        if found := self._problems(folders):
            self._note_problems(0, found)
            raise UnhealthyNode(found[0].text)
        return self.open(address)

    def open(self, address: str) -> Rendezvous:
        """Listen for the other nodes, and publish the rendezvous."""
        plan = self.gang.plan
        if plan.nodes > 1:
            self._peers = Peers(self.selector, address, plan.nodes)
            self._peers.on_message, self._peers.on_exit = self._take_message, self._on_exit
            self._peers.on_lost = self._on_lost
        path = self.gang.trial.rendezvous(self.gang.attempt)
        rendezvous = publish(path, address, self._peers.port if self._peers else 0)
        if self._peers:
            self._peers.secret = rendezvous.secret
            if self.gang.job:
                self.gang.job.publish(self.gang.attempt, rendezvous)
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
        news = self.heartbeats.news()
        self._hang_watch.take(news)
        self._live_progress.take(news)
        if self._live_progress.is_due(self._clock.seconds()) and not self.awaits_stacks:
            self.heartbeats.ask_one(0)
        if failure := self._hang_watch.failure():
            note_failure(self.gang.trial, self.gang.attempt, failure)
            self.end()
        self._polled_at = time.monotonic()

    def report_exit(self, code: int) -> None:
        if self._peers:
            self._peers.tell({"exit": code})

    def close(self) -> None:
        """Wait for the other nodes to exit, note those that were lost, and close the connections."""
        if self._peers:
            # After a failure other nodes may still run; the way they end may show its cause.
            self._peers.await_exits(EXITS_S)
            self._note_lost()
            self._peers.close()

    def ready(self) -> None:
        self._note_ready(0)

    def _note_ready(self, node: int) -> None:
        """Record that a node is ready; when all are, tell them."""
        self._ready.add(node)
        # Without health checks, node 0 does not insist on a connection to each node.
        insists = self.gang.plan.health_checks
        if len(self._ready) == self.gang.plan.nodes or (not insists and self._ready.issuperset({0, *self._present})):
            if self._peers:
                self._peers.tell({"start": True})
            self.on_all_ready()

    @property
    def _present(self) -> set[int]:
        """The other nodes that have connected."""
        return self._peers.present if self._peers else set()

    @property
    def awaits_nodes(self) -> bool:
        if self._arrivals or self._lost:
            return True
        now = self._clock.seconds()
        self._done_at = now if self._done_at is None else self._done_at
        return bool(self._peers and self._peers.present and now < self._done_at + LINGER_S)

    def _tell(self, message: Head) -> None:
        if self._peers:
            self._peers.tell(message)

    def _take_message(self, node: int, message: Head) -> None:
        if "stop" in message:
            self._take_stop(message)
        if "problems" in message:
            self._welcome(node, message)
        if "ready" in message:
            self._note_ready(node)
        self._hang_watch.take(message.get("ranks", ()))

    def _welcome(self, node: int, report: Head) -> None:
        """Record the report of a node that has connected; end the gang if the node is unhealthy."""
        self._offsets[node] = self._offset(report["time"])
        if self._stop and self._peers:
            self._peers.tell(self._stop, node)
        if report["problems"]:
            self._note_problems(node, [NodeProblem(*problem) for problem in report["problems"]])
            if self._peers:
                self._peers.tell({"noted": True}, node)
            self.end()

    def _offset(self, node_time: float) -> float:
        """Return the seconds by which the clock of the sender is ahead of this node's."""
        # The message may have waited here unread, for example while this process was suspended; that is not an offset.
        offset, unread_s = node_time - time.time(), time.monotonic() - self._polled_at
        return offset if offset > 0 else min(offset + unread_s, 0.0)

    def _on_exit(self, node: int, code: int) -> None:
        """End the gang if an agent has failed; it has noted the failure."""
        if code:
            self.end()

    def _on_lost(self, node: int, why: str) -> None:
        """Record a lost node, to be noted after SETTLE_S."""
        host = self.gang.hosts[node]
        self._lost.append(Failure(rank=None, host=host, time=time.time(), message=f"lost: {why}", node_lost=True))
        self._lost_at = min(self._lost_at, self._clock.seconds() + SETTLE_S)

    def _note_lost(self) -> None:
        """Note the lost nodes as failures."""
        for failure in self._lost:
            self._note(failure)
        self._lost, self._lost_at = [], float("inf")

    def _await_nodes(self, arrivals: Arrivals) -> None:
        """Check for missing nodes; when none is left, record the hosts and check the clocks."""
        # Every message of a node causes a poll, and a list of thousands of nodes for each would be quadratic.
        now = self._clock.seconds()
        if len(self._offsets) < self.gang.plan.nodes and now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        missing = [node for node in range(self.gang.plan.nodes) if node not in self._offsets]
        if not missing:
            self._arrivals = None
            write_json(self.gang.trial.nodes(self.gang.attempt), list(self.gang.hosts))
            self._check_clocks()
        for node in arrivals.down(missing):
            self._on_lost(node, f"{self.gang.plan.scheduler} reports it as down, and its agent has not connected")
        if arrivals.are_late and self.gang.plan.health_checks:
            for node in missing:
                self._note_problems(node, [NodeProblem(f"its agent did not report within {ARRIVE_S:.0f} s")])
            self.end()

    def _check_clocks(self) -> None:
        """End the gang if the clock of a node is wrong."""
        if not self.gang.plan.health_checks:
            return
        by_host = {self.gang.hosts[node]: offset for node, offset in sorted(self._offsets.items())}
        wrong = wrong_clocks(by_host)
        for host, problem in wrong.items():
            self._note_problems(list(self.gang.hosts).index(host), [problem])
        if wrong:
            self.end()

    def _ask_all(self, what: str) -> None:
        """Ask the ranks of all nodes."""
        self.ask_ranks(what)
        if self._peers:
            self._peers.tell({"ask": what})
