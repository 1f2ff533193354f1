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
from hpc_det.launch.watch.hang import HeartbeatServer
from hpc_det.launch.watch.health import NodeProblem, problems_of_node
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.frames import Head
from hpc_det.node.network import Rendezvous
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Failure, note_failure
from hpc_det.store.folders import TrialFolder

_STACKS_S = 3.0
"""Seconds after which a rank that has not sent its stacks is forced by a signal to write them."""
_WRITE_S = 1.0
"""Seconds for writing these stacks, until the ranks are reported as silent, after which node 0 may end the gang."""


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
