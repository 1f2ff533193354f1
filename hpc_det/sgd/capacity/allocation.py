"""Capacities that the driver already has: this machine, or the job that it runs in, with one agent per host."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hpc_det.errors import UsageError, count
from hpc_det.launch.log_tail import last_line
from hpc_det.node.network import address_towards, own_address
from hpc_det.node.process import kill_tree
from hpc_det.node.suspension import guard_from_now_on
from hpc_det.sgd.capacity.starters import LEAVE_S, Process, gpus_here, starter_of, variable_of_allocation
from hpc_det.sgd.elastic import agents
from hpc_det.sgd.elastic.agents import BackOff
from hpc_det.store.run_folder import RunFolder

START_S = 60.0
"""Seconds after the start of an agent from which on a lost agent is replaced although its starting command runs."""
ASK_S = 2.0
"""Shortest time in seconds between two requests for the hosts of the allocation."""
TERM_S = 3.0
"""Seconds that the starting commands may take to exit after `Starter.end`, before they are killed."""
POLL_S = 0.02
"""Seconds between two checks whether processes have ended."""


class Local:
    """This machine as a capacity: one node agent, which is a child of the driver.

    Args:
        slots: The largest number of ranks. None: as many as the trainer requests.
        has_gpus: Whether each slot has a GPU.

    Raises:
        UsageError: `slots` is below 1.
    """

    host = "127.0.0.1"
    min_slots = 1
    has_queue = False

    def __init__(self, slots: int | None = None, *, has_gpus: bool = False) -> None:
        if slots is not None and slots < 1:
            raise UsageError(f"Local(slots={slots}): slots must be at least 1, or None")
        self.slots = slots
        self.has_gpus = has_gpus
        self._again = BackOff()
        self._agent: Process | None = None
        self._command: list[str] = []
        self._log = Path()

    @classmethod
    def of_gpus(cls, env: Mapping[str, str]) -> Local:
        """Return this machine with a slot for each GPU that CUDA shows; without GPUs, with any number of slots."""
        count = len(gpus_here(env))
        return cls(count or None, has_gpus=count > 0)

    def start(self, run: Path, wanted: int) -> None:
        self._log = RunFolder(run).node_log(socket.gethostname())
        self._command = [sys.executable, *agents.arguments(run, self.slots or wanted)]
        if variable_of_allocation(os.environ):  # PBS suspends only the driver's session, not that of the agent
            guard_from_now_on()
        self._begin()

    def renew(self, missing_hosts: Collection[str]) -> bool:
        is_due = self.has_ended() and self._again.is_due()
        if is_due:
            self._begin()
        return is_due

    def has_ended(self) -> bool:
        return self._agent is not None and self._agent.poll() is not None

    def state(self) -> str:
        if self._agent is None:
            return "no agent was started on this machine"
        if self._agent.poll() is None:
            return f"the agent on this machine runs as process {self._agent.pid}"
        said = last_line(self._log, 0)
        return f"the agent on this machine has exited with code {self._agent.returncode}" + (said and f": {said}")

    def is_suspended(self, job: str) -> bool:
        """Return False: the agent is in the same job as the driver, or in none."""
        return False

    def stop(self) -> None:
        if self._agent is not None:
            all_ended([self._agent], LEAVE_S)
            kill_tree(self._agent)

    def _begin(self) -> None:
        self._again.begin()
        self._agent = start(self._command, self._log)


class Started(NamedTuple):
    """A command that has started agents."""

    process: Process
    hosts: tuple[str, ...]
    """The hosts on which it starts agents."""
    at: float
    """time.monotonic() of the start."""


class Allocation:
    """The allocation that this process is in as a capacity: a job of Slurm or PBS, or the hosts of an MPI's host file.

    Args:
        cpus_per_worker: CPUs that a rank takes if it takes no GPU.
        use_gpu: Whether each rank takes a GPU. "auto": if the allocation has GPUs.
        interface: Name of the network interface on which the driver listens. None: the one with the route to the other
            hosts.
        env: Environment that describes the allocation. None: os.environ.

    Raises:
        UsageError: The process is in no allocation, its commands are missing, or a host has too few CPUs for a rank.
    """

    min_slots = 1
    has_queue = False

    def __init__(
        self,
        *,
        cpus_per_worker: int = 1,
        use_gpu: bool | str = "auto",
        interface: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._starter = starter_of(os.environ if env is None else env)
        self.has_gpus = self._starter.gpus > 0
        by_gpu = self.has_gpus and bool(use_gpu)
        self._slots = {
            host: self._starter.gpus if by_gpu else cpus // cpus_per_worker for host, cpus in self._starter.cpus.items()
        }
        if not all(self._slots.values()):
            raise UsageError(
                f"{self._starter.name} has {count(min(self._starter.cpus.values()), 'CPU')} on a node, but a worker "
                f"takes {cpus_per_worker}; request more CPUs, or reduce num_cpus_per_worker"
            )
        self.host = "127.0.0.1" if self.is_this_host else self._address(interface)
        self._again = {host: BackOff() for host in self._slots}
        self._started: dict[str, Started] = {}
        """By host, the last command that started an agent there."""
        self._all: list[Process] = []
        """The starting commands that may still run."""
        self._run, self._log = Path(), Path()
        self._held: Collection[str] = self._starter.hosts
        """The hosts that the allocation had at the last request."""
        self._asked = 0.0

    @property
    def slots(self) -> int:
        """The number of slots on all hosts."""
        return sum(self._slots.values())

    @property
    def is_this_host(self) -> bool:
        """True if the allocation is one host, and the driver runs on it."""
        return [_short(host) for host in self._slots] == [_short(socket.gethostname())]

    def _address(self, interface: str | None) -> str:
        """Return the address of this host on the network of the other hosts."""
        others = (host for host in self._slots if _short(host) != _short(socket.gethostname()))
        known = None if interface else address_towards(others)
        return known or own_address(2, interface, "interface")[0]

    def start(self, run: Path, wanted: int) -> None:
        self._run, self._log = run, RunFolder(run).logs / "start-agents.log"
        self._begin(self._slots)

    def renew(self, missing_hosts: Collection[str]) -> bool:
        lost = [host for host in self._without_agent(set(map(_short, missing_hosts))) if self._again[host].is_due()]
        if lost:
            self._ask()
        rounds = self._rounds()
        for host in set(lost) & set(self._held):
            former = self._started[host]
            if len(former.hosts) == 1:  # else the command still runs agents on other hosts
                kill_tree(former.process)
            self._begin({host: self._slots[host]})
        return self._rounds() > rounds

    def has_ended(self) -> bool:
        return all(process.poll() is not None for process in self._all)

    def state(self) -> str:
        self._ask()
        lost = [host for host in self._slots if host not in self._held]
        bare = [host for host in self._without_agent(set()) if host not in lost]
        said = last_line(self._log, 0)
        return "; ".join(
            [
                f"{self._starter.name} has {', '.join(self._held) or 'no node any more'}",
                *([f"it has lost {', '.join(lost)}"] if lost else []),
                *([f"no agent runs on {', '.join(bare)}" + (said and f": {said}")] if bare else []),
            ]
        )

    def is_suspended(self, job: str) -> bool:
        """Return False: the driver is in this job, and is suspended with it."""
        return False

    def stop(self) -> None:
        all_ended(self._all, LEAVE_S)
        self._starter.end([process for process in self._all if process.poll() is None])
        all_ended(self._all, TERM_S)
        for process in self._all:
            kill_tree(process)

    def _begin(self, slots: Mapping[str, int]) -> None:
        """Start agents on the hosts in `slots`, which has the number of slots by host."""
        for hosts, command in self._starter.commands(self._run, slots):
            process = start(command, self._log, env=self._starter.environment())
            self._all = [*(each for each in self._all if each.poll() is None), process]
            for host in hosts:
                self._again[host].begin()
                self._started[host] = Started(process, hosts, time.monotonic())

    def _rounds(self) -> int:
        """Return how often agents were started on each of the hosts that the allocation still has."""
        return min((self._again[host].starts for host in self._slots if host in self._held), default=0)

    def _without_agent(self, missing: Collection[str]) -> Iterator[str]:
        """Yield the hosts that need a new agent; `missing`: short names of hosts whose agent was lost."""
        # A starting command normally exits with its agent. It does not if it has started agents on other hosts too, or
        # has lost its connection to the host: then the agent's lost connection to the driver decides.
        for host, started in self._started.items():
            has_ended = started.process.poll() is not None
            is_blind = len(started.hosts) > 1 or time.monotonic() > started.at + START_S
            if has_ended or (is_blind and _short(host) in missing):
                yield host

    def _ask(self) -> None:
        """Update the hosts that the allocation still has, at most every ASK_S seconds."""
        if time.monotonic() > self._asked + ASK_S:
            self._held = self._starter.held()
            self._asked = time.monotonic()


def _short(host: str) -> str:
    """Return the host name without its domain; addresses are unchanged."""
    # Schedulers, MPI and gethostname() differ in whether they append the domain; a host file may contain addresses.
    return host if re.fullmatch(r"[\d.]+", host) else host.partition(".")[0]


# --- processes that the driver starts and is sure to end


def start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> Process:
    """Start a process with its output appended to `log`."""
    # In a new session: a Ctrl-C at the terminal must reach only the driver, which then ends its processes.
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as file:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def all_ended(processes: Collection[Process], within_s: float) -> bool:
    """Wait up to `within_s` seconds until all processes have ended; return whether they have."""
    end = time.monotonic() + within_s
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
