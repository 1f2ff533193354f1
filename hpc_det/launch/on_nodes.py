"""Starts one agent on each host of a PBS job and waits until all have ended, as srun does on Slurm.

    python3 -m hpc_det.launch.on_nodes (pbsdsh | pbs_tmrsh | mpiexec) FOLDER COMMAND... TRIAL_FOLDER ATTEMPT WORKER

The arguments name the first attempt; the agents may stay for further ones (hpc_det.launch.orders).

This process and the agents communicate through a temporary folder below FOLDER (hpc_det.schedulers.pbs.hosts). It exits
with 0 if all agents did. Otherwise it ends the remaining agents and exits with 1.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpc_det.errors import HpcDetError, UsageError
from hpc_det.launch.orders import Order
from hpc_det.node.process import STOP_SIGNALS, SignalPipe, adopt_orphans, end_descendants
from hpc_det.node.suspension import AwakeClock
from hpc_det.schedulers.pbs.hosts import POLL_S, HostFolder, hosts_of, lines_of, start, start_commands
from hpc_det.search.journal import SearchJournal
from hpc_det.store.attempt import Failure, failure_now, note_failure
from hpc_det.store.folders import TrialFolder
from hpc_det.store.journal import Journal

START_S = 120.0
"""Seconds after which a host without an agent counts as lost.

PBS may notice a dead host only minutes later, and the command that should start the agent waits as long.
"""
STARTER_LEAVES_S = 5.0
"""Seconds for starters to exit after the last agent's exit code; one whose MoM (PBS's daemon) is dead never exits."""
LEAVE_S = 15.0
"""Seconds for all agents to exit after the order to end; a starter whose host is lost never exits."""


class OnNodes:
    """The agents of a gang, and the commands that start them (starters)."""

    def __init__(self, folder: HostFolder, hosts: int) -> None:
        self._folder = folder
        self._hosts = hosts
        self._codes: dict[int, int] = {}
        """Exit codes of the agents that have ended, keyed by node rank, in the order in which they were found.

        -1 if the agent's starter has exited and the agent has written no exit code.
        """
        self._signals = SignalPipe((*STOP_SIGNALS, signal.SIGCHLD))
        self._parent = os.getppid()
        self._running: dict[subprocess.Popen[bytes], range] = {}
        """The starters, with the node ranks of the agents that each has started."""
        self.not_begun: list[int] = []
        """Node ranks of the hosts on which no agent has started."""

    def run(self, commands: Iterator[tuple[range, list[str]]]) -> int:
        """Start the agents with `commands`, wait until they have ended, and return the exit code. Raises UsageError.

        `commands`: the command of each starter, with the ranks of its nodes.
        """
        try:
            self._running = {start(command): ranks for ranks, command in commands}
        except OSError as error:
            raise UsageError(
                f"cluster.start_agents_with: {error.filename}: {error.strerror}; add its folder to the PATH of jobs "
                "with `setup`, or choose another of pbsdsh, pbs_tmrsh and mpiexec"
            ) from None
        self._watch()
        return 1 if self.not_begun else next((code for code in self._codes.values() if code), 0)

    @property
    def without_code(self) -> list[int]:
        """Node ranks of the agents without an exit code: they were killed, or their host could not be reached.

        Empty if this process's parent has exited: the job is being ended, so no host is to blame.
        """
        return [rank for rank in range(self._hosts) if self._codes.get(rank, -1) < 0] if self._is_awaited else []

    @property
    def _is_awaited(self) -> bool:
        """Return whether the parent still runs and waits for this process."""
        # PBS kills the sessions that it knows, and this process is in another one, so it must notice the end of its
        # parent.
        return os.getppid() == self._parent

    def _watch(self) -> None:
        """Wait until all starters have exited, and end all agents after the first failure."""
        clock, start_by, give_up_at = AwakeClock(), START_S, float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ)
            while self._running and clock.seconds() < give_up_at and self._is_awaited:
                selector.select(timeout=POLL_S)
                if set(self._signals.received()) & set(STOP_SIGNALS):
                    self._folder.order("TERM")
                self._look()
                if clock.seconds() >= start_by:
                    self._give_up_not_begun()
                    start_by = float("inf")
                if give_up_at < float("inf"):
                    continue
                if self.not_begun or any(self._codes.values()):
                    self._folder.order("end")
                    give_up_at = clock.seconds() + LEAVE_S
                elif len(self._codes) == self._hosts:
                    give_up_at = clock.seconds() + STARTER_LEAVES_S

    def _look(self) -> None:
        """Record the agents that have ended."""
        ended = [process for process in self._running if process.poll() is not None]
        # Read the files after polling the processes: an agent's exit code is written before its starter exits.
        for rank in set(range(self._hosts)) - self._codes.keys():
            if (code := self._folder.exit_code(rank)) is not None:
                self._codes[rank] = code
        for process in ended:
            for rank in self._running.pop(process):
                self._codes.setdefault(rank, -1)

    def _give_up_not_begun(self) -> None:
        """Stop waiting for the hosts on which no agent has started."""
        self.not_begun = [rank for rank in range(self._hosts) if not self._folder.has_begun(rank)]
        self._running = {process: ranks for process, ranks in self._running.items() if set(ranks) - set(self.not_begun)}


def _own_log() -> str | None:
    """Return the path of the file that stdout is redirected to, or None."""
    path = os.readlink("/proc/self/fd/1")
    return path if os.path.isfile(path) else None


def _lost(host: str, said: str, lost: int, hosts: int) -> Failure:
    """Return the failure of an agent that has ended without an exit code."""
    # If most of the gang is lost, single hosts are not to blame. PBS itself may notice a lost host only minutes later.
    if lost > hosts / 2:
        return failure_now(None, f"the agent on {host} {said}")
    return Failure(rank=None, host=host, time=time.time(), message=f"its agent {said}", node_lost=True)


def present_attempt(first: Order) -> tuple[TrialFolder, int]:
    """Return the attempt that the worker runs now, with its trial; the first one if none is open."""
    trial = TrialFolder(Path(first.trial))
    experiment = trial.experiment()
    trials = [trial]
    with suppress(OSError, HpcDetError):
        state = SearchJournal(experiment).state()
        work, last = state.open.get(first.worker), state.last_trial.get(first.worker)
        trials += [experiment.trial(number) for number in (work.trial if work else None, last) if number]
    for each in trials:
        journal = Journal(each.journal)
        job, number = journal.open_job(), journal.open_attempt()
        if job and number and job[0] == first.worker:
            return each, number
    return trial, first.attempt


def main(argv: list[str]) -> int:
    starter, parent, *command = argv
    order = Order.of(command[-3:])
    adopt_orphans()
    lines, hosts = lines_of(os.environ), hosts_of(os.environ)
    with tempfile.TemporaryDirectory(prefix=".nodes-", dir=parent) as path:
        folder = HostFolder.made(Path(path))
        script = folder.write_script(command, os.environ, log=_own_log())
        gang = OnNodes(folder, len(hosts))
        try:
            code = gang.run(start_commands(starter, lines, hosts, script))
        except UsageError as error:
            note_failure(*present_attempt(order), failure_now(None, str(error), user_error=True))
            code = 1
        lost = gang.without_code
        trial, attempt = present_attempt(order)
        for rank in lost:
            said = f"exited without reporting a cause; see the messages of {starter} in {trial.job_log}"
            if rank in gang.not_begun:
                said = f"did not start: {starter} started no process there within {START_S:g} s"
            note_failure(trial, attempt, _lost(hosts[rank], said, len(lost), len(hosts)))
        end_descendants()
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
