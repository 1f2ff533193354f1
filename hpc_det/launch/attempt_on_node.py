"""One attempt on one node, as the node's agent runs it.

It starts the entrypoint, after the startup hook if the code has one, and passes stop requests on: after a signal, or a
stop request in the run folder, it notifies the ranks, which save and exit. If a rank is lost, it ends the other ranks
of its node at once and reports the end of the attempt through node 0 to the other agents, which do the same. The code
of an attempt is 0 only if that of the entrypoint is. The result is in the outcome file, which rank 0 writes.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpc_det.launch.entrypoint import Entrypoint, Starter, environment_of, executed, of_attempt, without_torchrun
from hpc_det.launch.log_tail import LogWatch, how_it_ended, last_line, size_of, written_since
from hpc_det.launch.node_folders import NodeFolders
from hpc_det.launch.orders import Order, ToJob
from hpc_det.launch.startup_hook import StartupHook
from hpc_det.launch.watch.node_0 import SupervisorOfNode0
from hpc_det.launch.watch.other_node import SupervisorOfOtherNode
from hpc_det.launch.watch.supervisor import SupervisedGang, Supervisor
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.network import own_address
from hpc_det.node.oom import OomWatch
from hpc_det.node.process import (
    STOP_SIGNALS,
    SignalPipe,
    end_descendants,
    programs,
)
from hpc_det.plan.container import inside, into_container
from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers.scheduler import scheduler
from hpc_det.store.attempt import (
    Attempt,
    Failure,
    failure_now,
    first_failure,
    note_failure,
    read_stop,
    request_stop,
)
from hpc_det.store.folders import TrialFolder
from hpc_det.store.log_lines import note_time

POLL_S = 1.0
"""Seconds between two checks for a stop request in the run folder, which may come without a signal to this node."""


class Kept(NamedTuple):
    """What an agent keeps from one attempt to the next."""

    folders: NodeFolders
    signals: SignalPipe
    """Its stop signals and CHLD."""
    starter: Starter
    parent: int
    """The process id of its parent at its start."""
    job: ToJob | None
    """Its line to the job, if it has one."""


class AttemptOnNode:
    """One attempt on one node."""

    def __init__(self, order: Order, plan: JobPlan, kept: Kept, log: Path | None) -> None:
        """`log`: the file to which the entrypoint prints; None: where this process does."""
        self._trial = trial = TrialFolder(Path(order.trial))
        self._number = number = order.attempt
        self._worker = order.worker
        self._plan = plan
        self._kept = kept
        self._log = log
        self._container = plan.container if plan.container and plan.container.starts_entrypoint else None
        own_scheduler = scheduler(plan.scheduler)
        self._node_rank = own_scheduler.node_rank(os.environ)
        self._socket = f"{kept.folders.private}/agent"
        self._selector = selectors.DefaultSelector()
        self._selector.register(kept.signals.fd, selectors.EVENT_READ, self._on_signals)
        self._ranks = AgentSocket(self._socket, self._selector)
        """The connections to the ranks of this node."""
        self._ranks.on_lost = self._on_lost
        self._ranks.on_failed = self._end
        self._ranks.on_signal = self._on_stop_signal
        gang = SupervisedGang(trial, plan, number, own_scheduler.hosts(os.environ), kept.job)
        self._supervisor = supervisor_of_node(gang, self._node_rank, self._selector, self._ranks, end=self._end)
        self._supervisor.on_stop = self._on_stop
        self._hook = (
            StartupHook(gang, self._node_rank, kept.folders.private, self._selector) if plan.startup_hook else None
        )
        if self._hook:
            self._hook.on_end, self._supervisor.on_all_ready = self._supervisor.ready, self._hook.start_entrypoint
        self._ended = False
        """True once the attempt has been ended on this node."""
        self._next_poll = 0.0
        self._log_began = size_of(trial.job_log)
        """Bytes in the trial's log before this attempt; the log is one file for all attempts."""
        if self._node_rank == 0:
            note_time(trial.job_log)  # LogWatch records what is printed from now on
        self._log_watch = LogWatch(self._logs(), self._selector)
        self._oom = OomWatch()
        self._programs: dict[int, str] = {}
        """The newest children of the entrypoint with their programs, keyed by process id."""

    def run(self) -> int:
        """Run the entrypoint and return its exit code; 1 if a rank or a node was lost, or the attempt was killed."""
        code = 1
        try:
            code = self._watch(self._start())
        finally:
            # Before ending the ranks, which may take 10 s: the other agents end theirs in the meantime.
            self._supervisor.report_exit(code)
            self._kept.starter.forget()
            end_descendants()
            if self._hook:
                self._hook.close()
            self._log_watch.close()
            self._supervisor.close()
            self._ranks.close()
            self._selector.close()
        return code

    def _watch(self, entrypoint: Entrypoint) -> int:
        """Handle events until the ranks here are done and no other agent needs this one; return the exit code."""
        while not self._ended and (
            entrypoint.poll() is None or (not self._code_of(entrypoint) and self._supervisor.awaits_nodes)
        ):
            for key, _ in self._selector.select(timeout=min(POLL_S, self._log_watch.pause_s)):
                key.data()
            self._log_watch.poll()
            self._poll_run_folder()
            self._programs = programs(entrypoint.pid) or self._programs
            self._ranks.turn()
            self._supervisor.poll()
        if not self._ended:
            self._take_last_messages()
        if self._ended:
            return 1
        if code := self._code_of(entrypoint):
            self._note_entrypoint(entrypoint.returncode or 0)
        return 1 if code else 0

    def _code_of(self, entrypoint: Entrypoint) -> int:
        """Return the exit code of the entrypoint, which has ended; 1 if its hook has kept it from starting."""
        return int(entrypoint.returncode or (self._hook is not None and not self._hook.is_over))

    def _logs(self) -> list[Path]:
        """Return the logs of the ranks on this node and, on node 0, the job's log."""
        first = self._node_rank * self._plan.ranks_per_node
        ranks = range(first, first + self._plan.ranks_per_node)
        own = [self._trial.job_log] if self._node_rank == 0 else []
        return [*own, *(self._trial.rank_log(self._number, rank) for rank in ranks)]

    def _take_last_messages(self) -> None:
        """Handle the messages that arrived between the last select and the end of the entrypoint."""
        # A rank that is the entrypoint itself may exit before its messages were handled.
        for key, _ in self._selector.select(timeout=0):
            key.data()

    def _start(self) -> Entrypoint:
        """Start the entrypoint on this node. Raises UsageError if it cannot be executed."""
        plan, code = self._plan, self._plan.code
        address, interface = own_address(plan.nodes, plan.network_interface)
        environment = environment_of(plan, interface, self._kept.folders.scratch)
        is_plain = not self._hook and not self._container
        command = without_torchrun(plan.entrypoint) if plan.world_size == 1 else plan.entrypoint
        if is_plain:
            self._kept.starter.prepare(command, environment, code)  # it imports while the nodes meet
        environment = of_attempt(environment, self._meet(address), interface)
        if is_plain:
            return self._kept.starter.start(command, environment, code, self._log, self._selector)
        if self._container:
            environment["PYTHONPATH"] = inside(environment["PYTHONPATH"])
        plan = replace(plan, entrypoint=self._hook.command(environment)) if self._hook else plan
        if not self._container:
            return executed(plan.entrypoint, environment, code)
        folders = [folder for folder in self._kept.folders if folder]
        return executed(into_container(plan, self._container, environment, folders), dict(os.environ), code)

    def _meet(self, address: str) -> Attempt:
        """Wait for the rendezvous of the nodes, and return the attempt as its ranks see it.

        `address`: this node's.
        """
        rendezvous = self._supervisor.rendezvous(address, self._kept.folders)
        return Attempt(
            folder=str(self._trial.path),
            worker=self._worker,
            number=self._number,
            node_rank=self._node_rank,
            nodes=self._plan.nodes,
            ranks_per_node=self._plan.ranks_per_node,
            address=address,
            master_addr=rendezvous.host,
            master_port=rendezvous.port,
            secret=rendezvous.secret,
            socket=self._socket,
        )

    def _on_signals(self) -> None:
        for number in self._kept.signals.received():
            if number in STOP_SIGNALS:
                self._on_stop_signal(number.name)

    def _on_stop_signal(self, name: str) -> None:
        self._on_stop("signal", self._plan.end_of_grace(name), f"{name} on {socket.gethostname()}")

    def _on_stop(self, reason: str, deadline: float | None, source: str) -> None:
        """Handle a stop request of a signal to this node, or one that another node has passed on."""
        self._ask_to_stop(reason, deadline, source)
        # One writer for all nodes: the scheduler may signal thousands of them at once.
        if reason == "signal" and self._supervisor.polls_for_stops:
            with suppress(OSError):  # if this disk is full, the ranks may still save on another one
                request = request_stop(
                    self._trial.stop, attempt=self._number, reason="signal", source=source, deadline=deadline
                )
                reason = request.reason
        self._obey(reason, deadline, source)

    def _poll_run_folder(self) -> None:
        if time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + POLL_S
        request = read_stop(self._trial.stop, self._number) if self._supervisor.polls_for_stops else None
        if request:
            self._obey(request.reason, request.deadline, request.source)
        if os.getppid() != self._kept.parent:  # the parent has died, so no process waits for the result
            self._end()

    def _obey(self, reason: str, deadline: float | None, source: str) -> None:
        """Stop the ranks, or end them."""
        # Before the end of the hooks no rank has anything to save.
        if reason == "kill" or (self._hook and not self._hook.is_over):
            self._end()
        else:
            self._ask_to_stop(reason, deadline, source)

    def _ask_to_stop(self, reason: str, deadline: float | None, source: str) -> None:
        self._ranks.send_stop(reason, deadline)
        self._supervisor.pass_on_stop(reason, deadline, source)

    def _on_lost(self, rank: int) -> None:
        """Note a rank that has ended without reporting an exit code as lost, and end the attempt on this node."""
        # Collectives of the other ranks with this one would never complete.
        message = f"process {self._ranks.ranks[rank]} exited without reporting a cause (killed or crashed)"
        if self._oom.has_killed:
            message += f"; {self._oom.killer()}"
        note_failure(self._trial, self._number, failure_now(rank, message, lost=True))
        self._end()

    def _end(self) -> None:
        """End the attempt on this node, and note ranks that are already lost."""
        if self._ended:
            return
        self._ended = True
        # A failed rank waits for the agent's answer before it exits, so no launcher has killed its peers yet: ranks
        # that are dead now died first. The connection of a killed rank may end a moment after those to its peers, so
        # look for such ranks.
        for rank in self._ranks.dead_ranks():
            self._on_lost(rank)

    def _note_entrypoint(self, code: int) -> None:
        """Note the failure of the hook or the entrypoint with exit code `code`, unless a failure is noted already."""
        if first_failure(self._trial, self._number) is not None:
            return
        if self._hook and self._hook.ended_the_shell:
            note_failure(self._trial, self._number, self._hook.failure(code, self._oom.killer()))
        else:
            note_failure(self._trial, self._number, self._failure_of_entrypoint(code))

    def _failure_of_entrypoint(self, code: int) -> Failure:
        log, began = self._trial.job_log, self._log_began
        return failure_now(
            None,
            how_it_ended(code, log, began, self._oom.killer(), self._newest_programs()),
            user_error=code in (126, 127),  # sh(1): the command cannot be executed, or was not found
            scheduler_away=code > 0 and scheduler(self._plan.scheduler).was_away(written_since(log, began)),
            printed=last_line(log, began),
            code=code,
        )

    def _newest_programs(self) -> str:
        """Return which programs the entrypoint ran last, for a message; "" if it ran none."""
        newest = [f"process {pid} ({program})" for pid, program in self._programs.items()]
        return f"it ran {', '.join(newest[:2])}" if newest else ""


def supervisor_of_node(
    gang: SupervisedGang, node: int, selector: selectors.BaseSelector, socket: AgentSocket, end: Callable[[], None]
) -> Supervisor:
    """Return the supervisor for node `node`. `end`: ends the attempt on this node, and with it the gang."""
    if node == 0:
        return SupervisorOfNode0(gang, selector, socket, end)
    return SupervisorOfOtherNode(gang, selector, socket, end, node)
