"""A node agent's watch over its gang: nodes are well before ranks start, and ranks go on stepping afterwards.

Node 0 gathers what all say and gives the verdict, since a node with a dead file system could not write one down. Nobody
waits for anybody but an ill node, for its word to arrive: ranks load their libraries in the meantime.

node -> node 0: {"token": ..., "node": RANK, "time": ..., "problems": [...]}, then {"ranks": [what hearts said]};
node 0 -> node: {"ask": "progress" | "stacks"}, and {"heard": true} to an ill one.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hpc_det.errors import HpcDetError
from hpc_det.launch.doorbell import Doorbell
from hpc_det.launch.failure import Failure, note_failure
from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.watch.health import ANSWER_S, Problem, problems_of_node, wrong_clocks
from hpc_det.launch.watch.hearts import Hearts, Message
from hpc_det.launch.watch.peers import Peers, ToNode0
from hpc_det.launch.watch.rounds import Rounds
from hpc_det.node.rendezvous import Rendezvous, await_rendezvous, publish
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.files import write_json
from hpc_det.store.folders import TrialFolder

ARRIVE_S = 600.0
"""Nodes of one job may start minutes apart."""
_STACKS_S = 3.0
"""After this time a rank that has not shown its stacks is forced to."""
_WRITE_S = 1.0
"""What that may take; the verdict kills it."""
_SEND_EVERY_S = 0.5


class IllNode(HpcDetError):
    """No rank may start here. It is noted already."""


class Gang(NamedTuple):
    """Whose nodes and ranks are watched."""

    trial: TrialFolder
    plan: JobPlan
    attempt: int
    hosts: Sequence[str]
    """Of its nodes, by rank."""


class Vigil:
    """One node's part."""

    def __init__(self, gang: Gang, selector: selectors.BaseSelector, doorbell: Doorbell) -> None:
        self.gang = gang
        self.selector = selector
        self.hearts = Hearts(doorbell)
        self._force_at = self._report_at = float("inf")

    def meet(self, address: str, folders: NodeFolders) -> Rendezvous:
        """Where the ranks meet; `address` is this node's. Raises IllNode if this node fails its checks."""
        trial, plan = self.gang.trial, self.gang.plan
        found = problems_of_node(trial, plan, folders, os.environ) if plan.health_checks else []
        return self._meet(address, found)

    @property
    def awaits_nodes(self) -> bool:
        """Whether this agent must stay for some to come, though its own ranks are done."""
        return False

    def poll(self) -> None:
        """At least every second."""
        now = time.monotonic()
        if now > self._force_at:
            self._force_at, self._report_at = float("inf"), now + _WRITE_S
            self.hearts.force_stacks()
        if now > self._report_at:
            self._report_at = float("inf")
            self.hearts.report_silent()

    def ask_ranks(self, what: str) -> None:
        if what == "stacks":
            self._force_at = time.monotonic() + _STACKS_S
        self.hearts.ask(what)

    def was_stopped(self, seconds: float) -> None:
        """The job was suspended for so long: whatever is awaited may come so much later."""
        self._force_at += seconds
        self._report_at += seconds

    def close(self) -> None:
        raise NotImplementedError

    def _meet(self, address: str, found: list[Problem]) -> Rendezvous:
        raise NotImplementedError

    def _note(self, node: int, problems: Iterable[Problem]) -> None:
        """A problem of a folder that all share is the run's failure, and no verdict on the node."""
        problems = list(problems)
        text = "; ".join(problem.text for problem in problems)
        ill = not all(problem.is_shared for problem in problems)
        failure = Failure(rank=None, host=self.gang.hosts[node], time=time.time(), message=text, unhealthy=ill)
        print(f"hpc-det: {failure.sentence()}", file=sys.stderr, flush=True)
        try:
            note_failure(self.gang.trial, self.gang.attempt, failure)
        except OSError as error:
            print(f"hpc-det: this could not be noted: {error}", file=sys.stderr, flush=True)


class VigilOfNode0(Vigil):
    def __init__(
        self, gang: Gang, selector: selectors.BaseSelector, doorbell: Doorbell, end: Callable[[], None]
    ) -> None:
        """`end` ends the attempt."""
        super().__init__(gang, selector, doorbell)
        self._end = end
        self._peers: Peers | None = None
        self._rounds = Rounds(gang.plan, gang.hosts, self._ask_all)
        self._offsets = {0: 0.0}
        self._arrive_by: float | None = None

    def _meet(self, address: str, found: list[Problem]) -> Rendezvous:
        path = self.gang.trial.rendezvous(self.gang.attempt)
        if found:
            self._note(0, found)
            raise IllNode(found[0].text)
        if self.gang.plan.nodes > 1:
            self._peers = Peers(self.selector)
            self._peers.on_heard = self._hear
        meeting = publish(path, address, self._peers.port if self._peers else 0)
        if self._peers:
            self._peers.secret = meeting.secret
        self._arrive_by = time.monotonic() + ARRIVE_S
        return meeting

    def poll(self) -> None:
        super().poll()
        if self._arrive_by is not None:
            self._await_nodes(time.monotonic())
        self._rounds.take(self.hearts.news())
        if failure := self._rounds.failure():
            note_failure(self.gang.trial, self.gang.attempt, failure)
            self._end()

    def was_stopped(self, seconds: float) -> None:
        super().was_stopped(seconds)
        if self._arrive_by is not None:
            self._arrive_by += seconds
        self._rounds.was_stopped(seconds)

    def close(self) -> None:
        if self._peers:
            self._peers.close()

    @property
    def awaits_nodes(self) -> bool:
        return self._arrive_by is not None

    def _hear(self, node: int, message: Message) -> None:
        if "token" in message:
            self._welcome(node, message)
        self._rounds.take(message.get("ranks", ()))

    def _welcome(self, node: int, hello: Message) -> None:
        self._offsets[node] = hello["time"] - time.time()
        if hello["problems"]:
            self._note(node, [Problem(*problem) for problem in hello["problems"]])
            if self._peers:
                self._peers.tell({"heard": True}, node)
            self._end()

    def _await_nodes(self, now: float) -> None:
        missing = set(range(self.gang.plan.nodes)) - self._offsets.keys()
        if not missing:
            self._arrive_by = None
            write_json(self.gang.trial.nodes(self.gang.attempt), list(self.gang.hosts))
            self._check_clocks()
        elif self._arrive_by is not None and now > self._arrive_by and self.gang.plan.health_checks:
            for node in sorted(missing):
                self._note(node, [Problem(f"no word from its agent in {ARRIVE_S:.0f} s")])
            self._end()

    def _check_clocks(self) -> None:
        if not self.gang.plan.health_checks:
            return
        by_host = {self.gang.hosts[node]: offset for node, offset in sorted(self._offsets.items())}
        wrong = wrong_clocks(by_host)
        for host, problem in wrong.items():
            self._note(list(self.gang.hosts).index(host), [problem])
        if wrong:
            self._end()

    def _ask_all(self, what: str) -> None:
        self.ask_ranks(what)
        if self._peers:
            self._peers.tell({"ask": what})


class VigilOfAnotherNode(Vigil):
    def __init__(self, gang: Gang, selector: selectors.BaseSelector, doorbell: Doorbell, node: int) -> None:
        super().__init__(gang, selector, doorbell)
        self._node = node
        self._node_0: ToNode0 | None = None
        self._send_at = 0.0

    def _meet(self, address: str, found: list[Problem]) -> Rendezvous:
        meeting = await_rendezvous(self.gang.trial.rendezvous(self.gang.attempt))
        hello = {"node": self._node, "time": time.time(), "problems": found}
        try:
            self._node_0 = ToNode0(self.selector, meeting, hello, ANSWER_S)
        except OSError as error:
            self._cannot_reach(meeting, error)
        else:
            self._node_0.on_heard = lambda _, message: self._obey(message)
        if found:
            self._leave(found)
        return meeting

    def poll(self) -> None:
        super().poll()
        if self._node_0 and time.monotonic() >= self._send_at and (news := self.hearts.news()):
            self._send_at = time.monotonic() + _SEND_EVERY_S
            self._node_0.tell({"ranks": news})

    def close(self) -> None:
        if self._node_0:
            self._node_0.close()

    def _obey(self, message: Message) -> None:
        if "ask" in message:
            self.ask_ranks(message["ask"])

    def _cannot_reach(self, meeting: Rendezvous, error: OSError) -> None:
        where = f"{self.gang.hosts[0]} at {meeting.host}:{meeting.agents_port}"
        if isinstance(error, ConnectionRefusedError):  # the way is there, and the agent not any more
            raise HpcDetError(f"the agent of the first node, {where}, is gone")
        if self.gang.plan.health_checks:
            self._note(self._node, [Problem(f"no way to the first node, {where}: {error.strerror or error}")])
            raise IllNode("no way to the first node")

    def _leave(self, found: list[Problem]) -> None:
        """Not before node 0 knows why."""
        if self._node_0 is None or not self._node_0.answered():
            self._note(self._node, found)
        raise IllNode(found[0].text)


def vigil(
    gang: Gang, node: int, selector: selectors.BaseSelector, doorbell: Doorbell, end: Callable[[], None]
) -> Vigil:
    """The part of node `node`; `end` ends the attempt on this node, and with it the gang."""
    if node == 0:
        return VigilOfNode0(gang, selector, doorbell, end)
    return VigilOfAnotherNode(gang, selector, doorbell, node)
