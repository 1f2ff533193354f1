"""Node 0 asks all ranks, round by round, how far they are, and those that stand still where they stand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence

from hpc_det.launch.watch.hang import HangJudge, Standing, last_first, sentence
from hpc_det.launch.watch.heartbeat_server import Message
from hpc_det.node.heartbeat import Progress
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Failure

_VERDICT_S = 10.0
"""How long the stacks of all ranks may take."""


class Rounds:
    def __init__(self, plan: JobPlan, hosts: Sequence[str], ask_all: Callable[[str], None], clock: AwakeClock) -> None:
        """`hosts`: of the gang's nodes, by rank. `ask_all` asks every rank for "progress" or "stacks"."""
        self._plan = plan
        self._hosts = hosts
        self._ask_all = ask_all
        self._clock = clock
        self._judge = HangJudge(plan.world_size, plan.hang_timeout_s)
        self._next_round = 0.0 if plan.hang_timeout_s != 0 else float("inf")
        self._stacks_at: float | None = None
        """When they were asked for."""
        self._places: dict[int, Standing] = {}

    def take(self, news: Iterable[Message]) -> None:
        """What heartbeats have sent."""
        for message in news:
            progress = Progress(*(message[name] for name in Progress._fields))
            self._judge.hears(message["heartbeat"], progress)
            if "at" in message:
                self._places[message["heartbeat"]] = (progress, message["at"])

    def failure(self) -> Failure | None:
        """Asked every second at least: of a gang that hangs, once its ranks have shown where."""
        now = self._clock.seconds()
        if self._stacks_at is not None:
            return self._verdict(now, self._stacks_at + _VERDICT_S)
        if now >= self._next_round:
            self._next_round = now + self._judge.round_s
            self._ask_all("progress")
            now = self._clock.seconds()  # asking may have taken long
            if self._judge.is_hung(now):
                self._stacks_at = now
                self._ask_all("stacks")
        return None

    def _verdict(self, now: float, until: float) -> Failure | None:
        """Once all stacks are there, or their time is over. Ranks that moved in the meantime are let alone."""
        if len(self._places) < self._plan.world_size and now < until:
            return None
        self._stacks_at = None
        unknown = {rank: (progress, "no answer from its node") for rank, progress in self._judge.ranks.items()}
        groups = last_first(unknown | self._places)
        self._places = {}
        if not self._judge.stands_still:
            print("hpc-det: ranks that seemed to hang have gone on", file=sys.stderr, flush=True)
            return None
        rank = groups[0][1][0]
        host = self._hosts[rank // self._plan.ranks_per_node]
        message = sentence(self._judge.still_s, groups)
        return Failure(rank=rank, host=host, time=time.time(), message=message, hung=True)
