"""Agents on this machine, each of which represents a node: a capacity whose nodes a test removes and returns."""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hpc_det.node.process import kill_tree
from hpc_det.sgd.capacity.allocation import all_ended
from hpc_det.sgd.capacity.starters import LEAVE_S
from hpc_det.store.run_folder import RunFolder
from tests.sgd.forked_agents import start_agent


class LocalNodes:
    host = "127.0.0.1"
    min_slots = 1
    has_queue = False
    has_gpus = False

    def __init__(self, count: int, slots_each: int = 1) -> None:
        self.slots = count * slots_each
        self.count, self.slots_each = count, slots_each
        self.agents: list[Any] = []  # real or forked processes, with the same methods
        self.is_full = True
        """Whether a lost node returns."""
        self.renewals = 0

    def start(self, run: Path, wanted: int) -> None:
        self._run = run
        self.agents = [self._begin() for _ in range(self.count)]

    def renew(self, missing_hosts: Collection[str]) -> None:
        self.renewals += 1
        if self.is_full:
            self.agents = [agent if agent.poll() is None else self._begin() for agent in self.agents]

    def has_ended(self) -> bool:
        return all(agent.poll() is not None for agent in self.agents)

    def state(self) -> str:
        return (
            f"{sum(agent.poll() is None for agent in self.agents)} of {self.count} agents run on {socket.gethostname()}"
        )

    def is_suspended(self, job: str) -> bool:
        return False

    def stop(self) -> None:
        all_ended(self.agents, LEAVE_S)
        for agent in self.agents:
            kill_tree(agent)

    def take(self, number: int) -> None:
        """Kill the agent and all its descendants at once, as if the node had lost its power."""
        self.is_full = False
        kill_tree(self.agents[number])

    def give_back(self) -> None:
        self.is_full = True

    def _begin(self) -> Any:
        log = RunFolder(self._run).node_log(socket.gethostname())
        return start_agent([str(self._run), str(self.slots_each)], log)
