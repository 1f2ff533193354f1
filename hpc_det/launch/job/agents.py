"""The node agents of a worker: one process per node, which runs one attempt after another (hpc_det.launch.orders).

They are started for the first attempt. After an attempt that all of them have reported as ended they wait for the next
one, so that it needs no new processes, no new job step and no import of torch. If a node was lost, or an agent cannot
reach the job, all are dismissed after the attempt, and the next attempt starts new ones.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hpc_det.errors import HpcDetError
from hpc_det.launch.orders import LOST_S, ORDERS, Order, key_of
from hpc_det.node.forking import Forked, close_files_of_parent
from hpc_det.node.installation import Installation
from hpc_det.node.line_server import Event, TcpLineServer
from hpc_det.node.lines import Line, send_to
from hpc_det.node.network import allow_files, own_address
from hpc_det.node.process import STOP_SIGNALS, end_other_sessions, ends_with_parent
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan

LOOK_S = 5.0
"""Longest time in seconds between two calls of `turn` while an attempt runs."""
FOLLOW_S = 15.0
"""Seconds for all agents to report the end of an attempt after the first has reported a failure."""
LEAVE_S = 10.0
"""Seconds for the agents to exit when they are dismissed; then they are killed."""
OTHER_FILES = 256
"""Number of files that the job may have open besides its connections to agents."""

_OWN_AGENT = [sys.executable, "-m", "hpc_det.launch.agent"]
"""The command of an agent on this node, in this Python: it is forked from this process and not executed."""


class Agents:
    """The agents of one worker, and the process that has started them (the launcher): srun, on_nodes, or one agent."""

    def __init__(self, command: Sequence[str], plan: JobPlan, *, has_queue: bool) -> None:
        """`command`: starts one agent on each node, with an order's arguments appended."""
        self._command = [*command]
        self._plan = plan
        self._has_queue = has_queue
        self._installation = Installation()
        self._launcher: subprocess.Popen[bytes] | Forked | None = None
        self._board: TcpLineServer | None = None
        self._selector: selectors.BaseSelector | None = None
        """The selector that the board wakes, if any."""
        self._lines: dict[int, Line] = {}
        """The connections of the agents, keyed by node rank."""
        self._order: Order | None = None
        self._codes: dict[int, int] = {}
        """The exit codes that agents have reported for the present attempt, keyed by node rank."""
        self._rendezvous: dict[str, Any] | None = None
        """The message with the rendezvous of the present attempt, for nodes that connect later."""
        self._since_failure: AwakeClock | None = None
        """A clock that was started when an agent reported a failure; None if none has."""
        self._heard: list[signal.Signals] = []

    @contextmanager
    def waking(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Within the block, messages of agents wake this selector."""
        self._selector = selector
        if self._board:
            selector.register(self._board, selectors.EVENT_READ)
        try:
            yield
        finally:
            if self._board:
                selector.unregister(self._board)
            self._selector = None

    def begin(self, order: Order) -> None:
        """Have all agents run this attempt; start them if they do not wait for it."""
        self.turn()
        # srun copies the output of agents on several nodes to the log of the trial for which it was started.
        can_print = self._order is not None and (self._order.trial == order.trial or self._plan.nodes == 1)
        self._order, self._codes, self._rendezvous, self._since_failure = order, {}, None, None
        if can_print and self._all_are_here:
            send_to(self._lines.values(), order.message())
        else:
            self.dismiss()
            self._start(order)

    @property
    def are_outdated(self) -> bool:
        """Return whether an attempt was run, and the installed files of hpc_det were replaced since the job started.

        The agents and this process would then run the next attempt together with launchers of another version.
        """
        return self._order is not None and self._installation.is_replaced()

    @property
    def have_ended(self) -> bool:
        """Return whether the present attempt is over on all nodes, or the launcher has exited."""
        return self._launcher is None or self._launcher.poll() is not None or self._have_all_reported

    def turn(self) -> None:
        """Handle what the agents have sent."""
        if self._board is None:
            return
        self._board.turn()
        while not self._board.events.empty():
            self._take(self._board.events.get())
        is_late = self._since_failure is not None and self._since_failure.seconds() > FOLLOW_S
        if (self._codes and len(self._lines) < self._plan.nodes) or is_late:
            # Then they exit with the codes that they have reported, and the launcher ends the others.
            for node in self._codes.keys() & self._lines.keys():
                self._lines.pop(node).close()

    def signals(self) -> list[signal.Signals]:
        """Return the stop signals that agents have received between attempts and reported since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def finish(self) -> int:
        """Return the exit code of the attempt; dismiss the agents unless all have reported its end and stay."""
        if self._have_all_reported:
            if not self._all_are_here:
                self.dismiss()
            return next(filter(None, self._codes.values()), 0)
        launcher = self._launcher
        self.dismiss(within_s=0.0)
        return 1 if launcher is None or launcher.returncode is None else launcher.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the launcher, which passes it on."""
        if self._launcher:
            self._launcher.send_signal(signal.SIGTERM)

    def dismiss(self, within_s: float = LEAVE_S) -> None:
        """End the agents, and kill those that have not exited after this many seconds."""
        if self._board:
            if self._selector:
                self._selector.unregister(self._board)
            self._board.close()
        if self._launcher:
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(within_s)
            end_other_sessions()
        self._launcher, self._board, self._lines = None, None, {}

    @property
    def _all_are_here(self) -> bool:
        """Return whether every agent is connected and its launcher runs."""
        return self._launcher is not None and self._launcher.poll() is None and len(self._lines) == self._plan.nodes

    @property
    def _have_all_reported(self) -> bool:
        return len(self._codes) == self._plan.nodes

    def _start(self, order: Order) -> None:
        """Start new agents. If the job cannot listen for them, they exit after this attempt."""
        environment = dict(os.environ)
        with suppress(HpcDetError):
            environment[ORDERS] = self._listen()
        command = [*self._command, *order.arguments]
        # A thread may hold a lock, which stays locked in a forked process.
        if self._command == _OWN_AGENT and threading.active_count() == 1:
            self._launcher = Forked(lambda: _run_agent(order, environment), shown_as=command)
            return
        # A separate session, because Ctrl-C at a terminal is meant for the job, and an agent would take it for a
        # preemption. Commands that a thread of the job runs in this session, such as sbatch, survive the gang.
        #
        # An agent ends when its parent does, but only once it has looked up its parent's id. If the parent dies before
        # that, the scheduler ends the agent, and without a queue the kernel has to.
        self._launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=None if self._has_queue else ends_with_parent,
        )

    def _listen(self) -> str:
        """Open the line to the agents, and return its address for them. Raises HpcDetError."""
        secret = secrets.token_hex(16)
        allow_files(self._plan.nodes + OTHER_FILES)
        address, _ = own_address(self._plan.job_nodes, self._plan.network_interface)
        key = key_of(secret)
        self._board = TcpLineServer(
            address,
            lambda identity: key if self._is_awaited(identity) else None,
            lambda address: True,  # an agent proves by its key that it belongs to the gang
            gone_s=LOST_S,
            has_thread=False,
        )
        if self._selector:
            self._selector.register(self._board, selectors.EVENT_READ)
        return f"{address}:{self._board.port}:{secret}"

    def _is_awaited(self, identity: dict[str, Any]) -> bool:
        node = identity["node"]
        return type(node) is int and 0 <= node < self._plan.nodes and node not in self._lines

    def _take(self, event: Event) -> None:
        node = event.line.identity["node"]
        if event.kind == "arrived":
            if self._lines.setdefault(node, event.line) is not event.line:  # a second connection of the same node
                event.line.close()
            elif self._rendezvous:
                event.line.send(self._rendezvous)
        elif self._lines.get(node) is not event.line:
            return
        elif event.message is None:
            del self._lines[node]
        else:
            self._take_message(node, event.message.head)

    def _take_message(self, node: int, message: dict[str, Any]) -> None:
        if "ended" in message:
            if self._order and message["ended"] == self._order.attempt:
                self._codes[node] = code = int(message["code"])
                if code and self._since_failure is None:
                    self._since_failure = AwakeClock(LOOK_S)
        elif "rendezvous" in message:
            if node == 0 and self._order and message["attempt"] == self._order.attempt:
                self._rendezvous = message
                send_to((line for other, line in self._lines.items() if other), message)
        elif message.get("signal") in signal.Signals.__members__:
            heard = signal.Signals[message["signal"]]
            self._heard += [heard] if heard in STOP_SIGNALS else []


def _run_agent(order: Order, environment: Mapping[str, str]) -> int:
    """Be the agent, in a process that was forked from the job's."""
    close_files_of_parent()
    os.environ.update(environment)
    from hpc_det.launch.agent import main  # the job does not wait for its imports

    return main(order.arguments)
