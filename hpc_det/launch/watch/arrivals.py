"""Node 0 waits for the agents of the other nodes. The scheduler may know that one that does not come is down."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from hpc_det.errors import HpcDetError
from hpc_det.node.suspension import AwakeClock
from hpc_det.schedulers.scheduler import NoAnswer, run_command, scheduler

ARRIVE_S = 600.0
"""Nodes of one job may start minutes apart: prologs, cold file systems."""
ASK_EVERY_S = 10.0


class Arrivals:
    def __init__(self, scheduler_name: str, hosts: Sequence[str]) -> None:
        """`hosts`: of the gang's nodes, by rank."""
        self._scheduler = scheduler(scheduler_name)
        self._hosts = hosts
        self._clock = AwakeClock()
        self._ask_at = ASK_EVERY_S
        self._asking: threading.Thread | None = None
        self._down: Collection[str] = ()

    @property
    def are_late(self) -> bool:
        return self._clock.seconds() > ARRIVE_S

    def down(self, missing: Sequence[int]) -> list[int]:
        """Those of the missing nodes that the scheduler has called down since the last call."""
        now = self._clock.seconds()
        if missing and now >= self._ask_at and not (self._asking and self._asking.is_alive()):
            self._ask_at = now + ASK_EVERY_S
            self._asking = threading.Thread(target=self._ask, args=[missing], daemon=True)
            self._asking.start()
        known, self._down = self._down, ()
        return [node for node in missing if self._hosts[node] in known]

    def _ask(self, missing: Sequence[int]) -> None:
        """In a thread: a command may take as long as it likes."""
        try:
            self._down = self._scheduler.down_hosts([self._hosts[node] for node in missing], run_command)
        except NoAnswer:  # it is asked again
            pass
        except (HpcDetError, ValueError, KeyError):  # nodes may lack its commands
            self._ask_at = float("inf")
