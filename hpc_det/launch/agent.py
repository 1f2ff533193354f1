"""The node agent: one process per node and attempt, started by srun, by pbsdsh or as a child of the job process.

    python3 -m hpc_det.launch.agent TRIAL_FOLDER ATTEMPT WORKER

It starts the entrypoint on its node, after the startup hook if the code has one, and passes stop requests on: after a
signal, or a stop request in the run folder, it notifies the ranks, which save and exit. If a rank is lost, the agent
ends the other ranks of its node at once and reports its exit through node 0 to the other agents, which do the same. It
exits with 0 only if the entrypoint did. The result of the attempt is in the outcome file, which rank 0 writes.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from hpc_det.config.rank_variables import DETERMINED, NO_FORKS, PRELOAD, compat_packages, with_compat
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.log_tail import LogWatch, how_it_ended, last_line, size_of, written_since
from hpc_det.launch.node_folders import BadFolder, NodeFolders, node_folders
from hpc_det.launch.startup_hook import StartupHook
from hpc_det.launch.watch.supervisor import SupervisedGang, UnhealthyNode, supervisor_of_node
from hpc_det.node.agent_socket import AgentSocket
from hpc_det.node.files import take_umask_of
from hpc_det.node.import_bundle import VARIABLE as BUNDLE
from hpc_det.node.network import limit_look_ups, own_address, variables
from hpc_det.node.oom import OomWatch
from hpc_det.node.process import (
    STOP_SIGNALS,
    SignalPipe,
    adopt_orphans,
    end_descendants,
    ignore_stop_signals,
    outlives_parent,
    programs,
)
from hpc_det.node.suspension import guarded
from hpc_det.plan.container import inside, into_container, of_the_job
from hpc_det.plan.job_plan import JobPlan
from hpc_det.schedulers.scheduler import scheduler
from hpc_det.store.attempt import (
    Attempt,
    Failure,
    StopRequest,
    failure_now,
    first_failure,
    note_failure,
    read_stop,
    request_stop,
)
from hpc_det.store.folders import TrialFolder

POLL_S = 1.0
"""Seconds between two checks for a stop request in the run folder, which may come without a signal to this node."""


class Agent:
    """The agent of one node for one attempt."""

    def __init__(self, trial: TrialFolder, plan: JobPlan, number: int, worker: int, folders: NodeFolders) -> None:
        self._trial = trial
        self._plan = plan
        self._container = plan.container if plan.container and plan.container.starts_entrypoint else None
        self._folders = folders
        self._number = number
        self._worker = worker
        own_scheduler = scheduler(plan.scheduler)
        self._node_rank = own_scheduler.node_rank(os.environ)
        self._socket = f"{folders.private}/agent"
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        self._selector.register(self._signals.fd, selectors.EVENT_READ, self._on_signals)
        self._ranks = AgentSocket(self._socket, self._selector)
        """The connections to the ranks of this node."""
        self._ranks.on_lost = self._on_lost
        self._ranks.on_failed = self._end
        self._ranks.on_signal = self._on_stop_signal
        gang = SupervisedGang(trial, plan, number, own_scheduler.hosts(os.environ))
        self._supervisor = supervisor_of_node(gang, self._node_rank, self._selector, self._ranks, end=self._end)
        self._hook = StartupHook(gang, self._node_rank, folders.private, self._selector) if plan.startup_hook else None
        if self._hook:
            self._hook.on_end, self._supervisor.on_all_ready = self._supervisor.ready, self._hook.start_entrypoint
        self._parent = os.getppid()
        # The parent's end must not kill this process before it has ended the ranks; `_poll_run_folder` checks for it.
        outlives_parent()
        self._ended = False
        """True once the attempt has been ended on this node."""
        self._next_poll = 0.0
        self._log_began = size_of(trial.job_log)
        """Bytes in the trial's log before this attempt; the log is one file for all attempts."""
        self._log_watch = LogWatch(self._logs())
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
            end_descendants()
            if self._hook:
                self._hook.close()
            self._log_watch.close()
            self._supervisor.close()
            self._ranks.close()
        return code

    def _watch(self, entrypoint: subprocess.Popen[bytes]) -> int:
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
            self._note_entrypoint(entrypoint.returncode)
        return 1 if code else 0

    def _code_of(self, entrypoint: subprocess.Popen[bytes]) -> int:
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

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the entrypoint on this node. Raises UsageError if it cannot be executed."""
        environment = environment_of(self._plan, *self._meet(), self._folders.scratch)
        if self._container:
            environment["PYTHONPATH"] = inside(environment["PYTHONPATH"])
        plan = replace(self._plan, entrypoint=self._hook.command(environment)) if self._hook else self._plan
        command: Sequence[str] = plan.entrypoint
        if self._container:
            folders = [folder for folder in self._folders if folder]
            command = into_container(plan, self._container, environment, folders)
        try:
            return subprocess.Popen(
                command,
                cwd=self._plan.code,
                env=dict(os.environ) if self._container else environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=ignore_stop_signals,  # the agent handles them and notifies the ranks over its socket
            )
        except OSError as error:
            raise UsageError(f"entrypoint: {error.filename}: {error.strerror}") from None

    def _meet(self) -> tuple[Attempt, str | None]:
        """Wait for the rendezvous of the nodes.

        Return the attempt as its ranks see it, and the network interface to set for libraries, or None.
        """
        address, interface = own_address(self._plan.nodes, self._plan.network_interface)
        rendezvous = self._supervisor.rendezvous(address, self._folders)
        attempt = Attempt(
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
        return attempt, interface

    def _on_signals(self) -> None:
        for number in self._signals.received():
            if number in STOP_SIGNALS:
                self._on_stop_signal(number.name)

    def _on_stop_signal(self, name: str) -> None:
        deadline = self._plan.end_of_grace(name)
        self._ranks.send_stop("signal", deadline)
        source = f"{name} on {socket.gethostname()}"
        with suppress(OSError):  # if this disk is full, the ranks may still save on another one
            self._obey(
                request_stop(self._trial.stop, attempt=self._number, reason="signal", source=source, deadline=deadline)
            )

    def _poll_run_folder(self) -> None:
        if time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + POLL_S
        request = read_stop(self._trial.stop, self._number)
        if request:
            self._obey(request)
        if os.getppid() != self._parent:  # the parent has died, so no process waits for the result
            self._end()

    def _obey(self, request: StopRequest) -> None:
        # Before the end of the hooks no rank has anything to save.
        if request.reason == "kill" or (self._hook and not self._hook.is_over):
            self._end()
        else:
            self._ranks.send_stop(request.reason, request.deadline)

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


def environment_of(plan: JobPlan, attempt: Attempt, interface: str | None, scratch: str | None) -> dict[str, str]:
    """Return the environment of the entrypoint on this node.

    `interface`: the network interface between the nodes; `scratch`: the node's folder for temporary files.
    """
    is_inside = plan.container is not None and plan.container.starts_entrypoint
    # Of the job's variables, a container that the agent starts receives only those that ranks need in it, too.
    given = of_the_job(os.environ) if is_inside else os.environ
    wanted = dict(item.split("=", 1) for item in plan.environment)
    environment = {**given, **({"TMPDIR": scratch} if scratch else {}), **wanted, **attempt.to_env()}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [plan.code, environment.get("PYTHONPATH")]))
    environment["HPC_DET_SLOT_TYPE"] = plan.slot_type
    environment[BUNDLE] = plan.bundle
    environment[PRELOAD] = ",".join(plan.preload) if plan.nursery else NO_FORKS
    if plan.slot_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # the node may have GPUs that this gang did not request
        environment.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed reports on every rank that it found no GPU
    if plan.container:  # runtimes mount the home folder, and Python would import packages from it
        environment.setdefault("PYTHONNOUSERSITE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(plan.cpus_per_rank))
    limit_look_ups(environment)
    if interface:
        environment = {**variables(interface), **environment}
    packages = compat_packages(environment)
    if DETERMINED in packages:
        from hpc_det.launch.determined_variables import determined_variables  # other jobs need none of its imports

        environment = {**determined_variables(attempt, interface), **environment}
    return with_compat(environment, packages)


def main(argv: list[str]) -> int:
    trial = TrialFolder(Path(argv[0]))
    number, worker = int(argv[1]), int(argv[2])
    take_umask_of(trial.path)
    plan = JobPlan.of(trial.experiment())
    adopt_orphans()
    limit_look_ups(os.environ)
    try:
        # Only schedulers suspend jobs, so without one no guardian is needed.
        with guarded() if scheduler(plan.scheduler).has_queue else nullcontext(), node_folders(plan) as folders:
            return Agent(trial, plan, number, worker, folders).run()
    except UnhealthyNode:
        return 1
    except BadFolder as error:
        note_failure(trial, number, failure_now(None, str(error), unhealthy=True))
        return 1
    except HpcDetError as error:
        note_failure(trial, number, failure_now(None, str(error), user_error=isinstance(error, UsageError)))
        print(f"hpc-det: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
