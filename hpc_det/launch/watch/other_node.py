"""The supervision on a node other than node 0: it reports to node 0 and obeys it."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable

from hpc_det.errors import HpcDetError
from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.watch import peers
from hpc_det.launch.watch.health import ANSWER_S, NodeProblem
from hpc_det.launch.watch.peers import ToNode0
from hpc_det.launch.watch.supervisor import SupervisedGang, Supervisor, UnhealthyNode
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.frames import Head
from hpc_det.node.json_files import made
from hpc_det.node.lines import NoLine
from hpc_det.node.network import WAIT_S, Rendezvous, appeared, await_rendezvous
from hpc_det.node.suspension import AwakeClock

FILE_EVERY_S = 10.0
"""Seconds between two looks for the file of the rendezvous while an agent waits for the job to pass it on."""
_SEND_EVERY_S = 0.5
"""Seconds between two reports of heartbeats to node 0."""


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
