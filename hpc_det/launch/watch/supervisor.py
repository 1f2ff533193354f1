"""Supervision of a gang by its agents, from the health checks to the exit of the last agent.

Node 0 collects all reports and decides, because a node with a dead file system could not record a failure. It publishes
the rendezvous once it is healthy itself. From then on an agent starts its ranks without waiting for other nodes, so
that they load their libraries meanwhile; an unhealthy node starts none, and waits until node 0 has recorded its
problems. A node that is lost, or whose agent fails, ends the gang at once. Unless something has failed, node 0 exits
last.

Other nodes send {"hello": true}, {"time": ..., "problems": [...]}, {"ready": true} after a startup
hook, then {"ranks": [messages of heartbeats]}. Node 0 sends {"start": true} when all nodes are ready, {"ask":
"progress" | "stacks"}, and {"noted": true} to an unhealthy node. Both send {"exit": EXIT CODE} at their end, and
{"stop": REASON, "deadline": SECONDS SINCE THE EPOCH, OR NULL, "source": ORIGIN} for a stop request, which node 0 passes
on to all: only node 0 polls the run folder, and only node 0 writes the request there.
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
from hpc_det.launch.orders import ToJob
from hpc_det.launch.watch import peers
from hpc_det.launch.watch.hang import HangWatch, HeartbeatServer
from hpc_det.launch.watch.health import ANSWER_S, NodeProblem, problems_of_node, wrong_clocks
from hpc_det.launch.watch.live_progress import LiveProgress
from hpc_det.launch.watch.peers import ARRIVE_S, Arrivals, Peers, ToNode0
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.frames import Head
from hpc_det.node.json_files import made, write_json
from hpc_det.node.lines import NoLine
from hpc_det.node.network import WAIT_S, Rendezvous, appeared, await_rendezvous, publish
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Failure, note_failure
from hpc_det.store.folders import TrialFolder

SETTLE_S = 1.5
"""Seconds from the end of a connection until its node counts as lost.

If all agents are killed at about the same time, this one dies before that, so no node is blamed. A suspension counts as
one second (`AwakeClock`).
"""
LINGER_S = 60.0
"""Seconds that node 0 waits for the other agents after its own ranks; then it exits, and the scheduler ends them."""
EXITS_S = 3.0
"""Seconds for the agents of a failed gang to exit."""
FILE_EVERY_S = 10.0
"""Seconds between two looks for the file of the rendezvous while an agent waits for the job to pass it on."""
_STACKS_S = 3.0
"""Seconds after which a rank that has not sent its stacks is forced by a signal to write them."""
_WRITE_S = 1.0
"""Seconds for writing these stacks, until the ranks are reported as silent, after which node 0 may end the gang."""
_LOOK_EVERY_S = 0.5
"""Seconds between two looks for nodes that have not connected."""
_SEND_EVERY_S = 0.5
"""Seconds between two reports of heartbeats to node 0."""


class UnhealthyNode(HpcDetError):
    """No rank may start on this node; the failure is already noted."""


class SupervisedGang(NamedTuple):
    """The gang whose nodes and ranks are supervised."""

    trial: TrialFolder
    plan: JobPlan
    attempt: int
    hosts: Sequence[str]
    """Host names of the nodes, by node rank."""
    job: ToJob | None = None
    """The agent's line to the job, if it has one."""


class Supervisor:
    """The supervision on one node."""

    def __init__(
        self, gang: SupervisedGang, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
    ) -> None:
        """`end`: ends the attempt on this node, and with it the gang."""
        self.gang = gang
        self.selector = selector
        self.end = end
        self.heartbeats = HeartbeatServer(socket)
        self.on_all_ready: Callable[[], None] = lambda: None
        """Called when all nodes are ready to start their ranks."""
        self.on_stop: Callable[[str, float | None, str], None] = lambda reason, deadline, source: None
        """Called with the reason, deadline and source of a stop request that another node has passed on."""
        self._stop: Head | None = None
        """The stop request as a message; None before there was one."""
        self._clock = AwakeClock()
        """Measures all waits; excludes suspensions, during which no node can answer."""
        self._force_at = self._report_at = float("inf")
        """Seconds on the clock when silent ranks are signalled, and when they are reported; infinity: not due."""

    def rendezvous(self, address: str, folders: NodeFolders) -> Rendezvous:
        """Run the health checks, meet the other nodes, and return the rendezvous of the ranks.

        `address`: this node's. Raises UnhealthyNode if this node fails its health checks.
        """
        raise NotImplementedError

    def ready(self) -> None:
        """Report that this node is ready to start its ranks, for entrypoints that must start together."""
        raise NotImplementedError

    @property
    def polls_for_stops(self) -> bool:
        """Return whether this agent must poll the run folder for stop requests, as no other node passes them on."""
        return True

    def pass_on_stop(self, reason: str, deadline: float | None, source: str) -> None:
        """Pass a stop request on to the other nodes. Later calls do nothing."""
        if self._stop is None:
            self._stop = {"stop": reason, "deadline": deadline, "source": source}
            self._tell(self._stop)

    def _take_stop(self, message: Head) -> None:
        self.on_stop(str(message["stop"]), message["deadline"], str(message["source"]))

    def _tell(self, message: Head) -> None:
        """Send a message to node 0; on node 0 to all others."""
        raise NotImplementedError

    @property
    def awaits_nodes(self) -> bool:
        """Return whether this agent must wait for others to connect or exit, once its own ranks are done."""
        return False

    def poll(self) -> None:
        """Do what is due; called at least once a second."""
        now = self._clock.seconds()
        if now > self._force_at:
            self._force_at, self._report_at = float("inf"), now + _WRITE_S
            self.heartbeats.force_stacks()
        if now > self._report_at:
            self._report_at = float("inf")
            self.heartbeats.report_silent()

    @property
    def awaits_stacks(self) -> bool:
        """Return whether ranks of this node have been asked for their stacks, and are not reported as silent yet."""
        return min(self._force_at, self._report_at) < float("inf")

    def ask_ranks(self, what: str) -> None:
        """Ask the ranks of this node for "progress" or "stacks"."""
        if what == "stacks":
            self._force_at = self._clock.seconds() + _STACKS_S
        self.heartbeats.ask(what)

    def report_exit(self, code: int) -> None:
        """Report to the other agents that this agent exits with `code`. After a failure its ranks may still run."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections to the other agents."""
        raise NotImplementedError

    def _problems(self, folders: NodeFolders) -> list[NodeProblem]:
        """Return the problems of this node, or nothing if health checks are disabled."""
        plan = self.gang.plan
        return problems_of_node(self.gang.trial, plan, folders, os.environ) if plan.health_checks else []

    def _note_problems(self, node: int, problems: Iterable[NodeProblem]) -> None:
        """Note problems of a node as a failure: a full disk if all are of the shared folder, else an unhealthy node."""
        problems = list(problems)
        text = "; ".join(problem.text for problem in problems)
        ill = not all(problem.is_shared for problem in problems)
        found = Failure(
            rank=None, host=self.gang.hosts[node], time=time.time(), message=text, unhealthy=ill, disk_full=not ill
        )
        self._note(found)

    def _note(self, failure: Failure) -> None:
        """Print a failure and record it in the run folder."""
        print(f"hpc-det: {failure.sentence()}", file=sys.stderr, flush=True)
        note_failure(self.gang.trial, self.gang.attempt, failure)


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


class SupervisorOfOtherNode(Supervisor):
    """The supervision on a node other than node 0."""

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
        """Connect to node 0, run the health checks and report them, and return the rendezvous."""
        rendezvous = self._await_rendezvous()
        try:
            # Before the checks, so that node 0 notices if this node is lost during them.
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

    def ready(self) -> None:
        if self._node_0:
            self._node_0.tell({"ready": True})
        else:  # without health checks, a node may continue without a connection
            self.on_all_ready()

    def report_exit(self, code: int) -> None:
        if self._node_0:
            self._node_0.close(code)

    def close(self) -> None:
        """Delay the exit if node 0 was lost."""
        if self._has_lost_node_0:
            # Node 0 has lost this node, too, perhaps a little later. It must note that before srun ends its agent
            # because of this one's exit code (--kill-on-bad-exit).
            time.sleep(peers.LOST_S * 2 / 3)

    def _await_rendezvous(self) -> Rendezvous:
        """Return the rendezvous that node 0 has published. Raises HpcDetError if none comes."""
        path, clock = self.gang.trial.rendezvous(self.gang.attempt), AwakeClock(FILE_EVERY_S)
        job = self.gang.job
        while job and job.stands and clock.seconds() < WAIT_S:
            if found := job.rendezvous(self.gang.attempt, FILE_EVERY_S):
                return found
            if data := appeared(path):  # node 0 does not reach the job
                return made(Rendezvous, data, path)
        return await_rendezvous(path)

    @property
    def polls_for_stops(self) -> bool:
        return self._node_0 is None

    def _tell(self, message: Head) -> None:
        if self._node_0:
            self._node_0.tell(message)

    def _obey(self, message: Head) -> None:
        if "stop" in message:
            self._take_stop(message)
        if "ask" in message:
            self.ask_ranks(message["ask"])
        if "start" in message:
            self.on_all_ready()

    def _on_exit(self, code: int) -> None:
        if code:
            self.end()

    def _on_lost(self, why: str) -> None:
        """End the ranks here after the loss of node 0."""
        # No agent is left that decides: on node 0 the job has ended, or it will notice the loss of this node.
        self._has_lost_node_0 = True
        print(f"hpc-det: node {self.gang.hosts[0]} lost: {why}; ending the ranks here", file=sys.stderr, flush=True)
        self.end()

    def _cannot_reach(self, rendezvous: Rendezvous, error: OSError) -> None:
        """Raise HpcDetError if node 0's agent has exited, else UnhealthyNode if health checks are enabled.

        Without health checks this node continues without a connection.
        """
        where = f"{self.gang.hosts[0]} at {rendezvous.host}:{rendezvous.agents_port}"
        if isinstance(error, ConnectionRefusedError):  # the node answers, but no agent listens any more
            raise HpcDetError(f"the agent of the first node, {where}, has exited")
        if self.gang.plan.health_checks:
            self._note_problems(
                self._node, [NodeProblem(f"cannot connect to the first node, {where}: {error.strerror or error}")]
            )
            raise UnhealthyNode("cannot connect to the first node")

    def _leave(self, found: list[NodeProblem]) -> None:
        """Wait until node 0 has recorded the problems, or record them here, then raise UnhealthyNode."""
        if self._node_0 is None or not self._node_0.answered():
            self._note_problems(self._node, found)
        raise UnhealthyNode(found[0].text)


def supervisor_of_node(
    gang: SupervisedGang, node: int, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
) -> Supervisor:
    """Return the supervisor for node `node`. `end`: ends the attempt on this node, and with it the gang."""
    if node == 0:
        return SupervisorOfNode0(gang, selector, socket, end)
    return SupervisorOfOtherNode(gang, selector, socket, end, node)
