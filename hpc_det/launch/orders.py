"""Orders of the job to its node agents, which stay on their nodes between the attempts.

The job listens (hpc_det.launch.job.agents) and passes its address to the agents in their environment. The first order
of an agent is on its command line. An agent that cannot connect exits after that one.

agent -> job: {"hello": true}, then {"ended": ATTEMPT, "code": EXIT CODE} after each attempt, and {"signal": NAME} for a
stop signal that comes between two attempts; job -> agent: {"run": ORDER}. The agent of node 0 sends {"rendezvous":
RENDEZVOUS, "attempt": ATTEMPT}, which the job passes on to the others. The end of the connection dismisses the agent.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass

from hpc_det.errors import HpcDetError
from hpc_det.node.key import derived
from hpc_det.node.lines import Line, connect
from hpc_det.node.network import Rendezvous
from hpc_det.node.process import STOP_SIGNALS, SignalPipe

ORDERS = "HPC_DET_ORDERS"
"""The variable with the job's address and the secret of this line: HOST:PORT:SECRET."""
LOST_S = 15.0
"""Seconds without an answer from a host after which its end of the line is lost."""
_CONNECT_S = 20.0
"""Seconds in which an agent must reach the job, which accepts thousands of agents in 2 s of CPU time."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One attempt to run."""

    trial: str
    """Path of the trial's folder."""
    attempt: int
    worker: int

    @property
    def arguments(self) -> list[str]:
        """The order as the arguments of an agent."""
        return [self.trial, str(self.attempt), str(self.worker)]

    @classmethod
    def of(cls, arguments: list[str]) -> Order:
        """Return the order in the arguments of an agent."""
        trial, attempt, worker = arguments
        return cls(trial=trial, attempt=int(attempt), worker=int(worker))

    def message(self) -> dict[str, object]:
        return {"run": asdict(self)}


def key_of(secret: str) -> bytes:
    """Return the key of the line between the job and its agents."""
    return derived(secret.encode(), "orders")


class ToJob:
    """The agent's end of the line."""

    def __init__(self, line: Line) -> None:
        self.stands = True
        """False once the connection has ended."""
        self._line = line
        line.send({"hello": True})

    @classmethod
    def connected(cls, env: MutableMapping[str, str], node: int) -> ToJob | None:
        """Remove the job's address from `env`, and return a connection to it; None if there is none.

        `node`: this node's rank.
        """
        where = env.pop(ORDERS, "")
        if not where:
            return None
        host, port, secret = where.rsplit(":", 2)
        identity = {"role": "agent", "node": node}
        try:
            line = connect(
                host,
                int(port),
                key_of(secret),
                identity,
                _CONNECT_S,
                listener="the job",
                gone_s=LOST_S,
                awaits_listener=False,
            )
        except HpcDetError:  # the agents of other gangs may be on nodes that cannot reach the job's
            return None
        return cls(line)

    def next(self, ended: Order, code: int, signals: SignalPipe) -> Order | None:
        """Report the exit code of an attempt, wait, and return the next order; None if the job has dismissed the agent.

        Meanwhile the stop signals in `signals` are reported to the job.
        """
        self._line.send({"ended": ended.attempt, "code": code})
        with selectors.DefaultSelector() as selector:
            selector.register(self._line.connection, selectors.EVENT_READ)
            selector.register(signals.fd, selectors.EVENT_READ)
            while self.stands and not self._runs():
                ready = [key.fileobj for key, _ in selector.select()]
                for number in signals.received():
                    if number in STOP_SIGNALS:
                        self._line.send({"signal": number.name})
                if self._line.connection in ready:
                    self.stands = self._line.take()
        return Order(**self._line.received.popleft().head["run"]) if self._line.received else None

    def _runs(self) -> bool:
        """Return whether the next message is an order; drop others, which are for the attempt that has ended."""
        while self._line.received and "run" not in self._line.received[0].head:
            self._line.received.popleft()
        return bool(self._line.received)

    def close(self) -> None:
        self._line.close()

    def publish(self, attempt: int, rendezvous: Rendezvous) -> None:
        """Send the rendezvous to the other nodes, on node 0."""
        self._line.send({"rendezvous": asdict(rendezvous), "attempt": attempt})

    def rendezvous(self, attempt: int, within_s: float) -> Rendezvous | None:
        """Wait for the rendezvous of this attempt, on the other nodes; return None if it does not come."""
        end = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._line.connection, selectors.EVENT_READ)
            while self.stands and (left_s := end - time.monotonic()) > 0:
                if selector.select(left_s):
                    self.stands = self._line.take()
                while self._line.received:
                    head = self._line.received.popleft().head
                    if head.get("attempt") == attempt and "rendezvous" in head:
                        return Rendezvous(**head["rendezvous"])
        return None
