"""This machine: one node agent, a child of the driver."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.launch.log_tail import last_line
from hpc_det.node.suspension import guard_from_now_on
from hpc_det.sgd.capacity.starters import LEAVE_S, Process, all_ended, gpus_here, kill, start, variable_of_allocation
from hpc_det.sgd.elastic import agents
from hpc_det.sgd.elastic.agents import BackOff
from hpc_det.store.run_folder import RunFolder


class Local:
    """`slots`: the most ranks; None: as many as the driver wants. Raises UsageError for fewer than one."""

    host = "127.0.0.1"
    min_slots = 1
    has_queue = False

    def __init__(self, slots: int | None = None, *, has_gpus: bool = False) -> None:
        if slots is not None and slots < 1:
            raise UsageError(f"Local(slots={slots}): a node has room for 1 rank or more")
        self.slots = slots
        self.has_gpus = has_gpus
        self._again = BackOff()
        self._agent: Process | None = None
        self._command: list[str] = []
        self._log = Path()

    @classmethod
    def of_gpus(cls, env: Mapping[str, str]) -> Local:
        """A slot for each GPU that CUDA shows here; where there is none, as many as the driver wants."""
        count = len(gpus_here(env))
        return cls(count or None, has_gpus=count > 0)

    def start(self, run: Path, wanted: int) -> None:
        self._log = RunFolder(run).node_log(socket.gethostname())
        self._command = [sys.executable, *agents.arguments(run, self.slots or wanted)]
        if variable_of_allocation(os.environ):  # PBS suspends only the session that the driver is in
            guard_from_now_on()
        self._begin()

    def renew(self, missing_hosts: Collection[str]) -> None:
        if self._agent is not None and self._agent.poll() is not None and self._again.is_due():
            self._begin()

    def state(self) -> str:
        if self._agent is None:
            return "no agent was started on this machine"
        if self._agent.poll() is None:
            return f"the agent on this machine runs as process {self._agent.pid}"
        said = last_line(self._log, 0)
        return f"the agent on this machine has ended with exit code {self._agent.returncode}" + (said and f": {said}")

    def is_suspended(self, job: str) -> bool:
        return False

    def stop(self) -> None:
        if self._agent is not None:
            all_ended([self._agent], LEAVE_S)
            kill(self._agent)

    def _begin(self) -> None:
        self._again.begin()
        self._agent = start(self._command, self._log)
