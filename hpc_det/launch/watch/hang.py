"""When a gang hangs: node 0 asks all ranks, round by round, how far they are, and those that stand still where.

Ranks that train together stand still together, so the question is when any of them moved last. How long they may stand
still depends on what the last of them do, for whom the others wait: in the loops over batches a limit, which the user
sets or which is learned; the first step of a loop may compile for long, and what lies between the steps, such as
saving, may take hours. A function of the user's may take as long as it likes, unless the user sets a limit or another
rank is through with it. The judge is pure arithmetic.

Each agent asks the ranks of its node, over their heartbeats, and keeps what each sent last.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from hpc_det.node.agent_socket import AgentSocket, number_in
from hpc_det.node.frames import BrokenRule, Head
from hpc_det.node.heartbeat import STACKS_SIGNAL, Progress
from hpc_det.node.lines import Line
from hpc_det.node.suspension import AwakeClock
from hpc_det.plan.job_plan import JobPlan
from hpc_det.store.attempt import Failure

LEAST_S = 600.0
TIMES_LONGEST = 20
"""The learned limit is so many times the longest standstill that ended, and at least `LEAST_S`."""
_PATIENCE_S: dict[str, float] = {
    "meeting": 300.0,  # once the last of them has come: their first collective takes milliseconds
    "between steps": 4 * 3600.0,
    "training": 3600.0,
    "validation": 3600.0,
}
"""By phase; for the loops over batches before their first step is done. Outside, nobody is waited for."""
_FUNCTIONS = ("setup", "function", "loop")
_FUNCTION_S = 4 * 3600.0
_ROUNDS_PER_LIMIT = 20
_ROUND_S = (0.25, 30.0)
_VERDICT_S = 10.0
"""How long the stacks of all ranks may take."""
_COLLECTIVES = "(distributed_c10d.py:"
"""In the place of a rank that waits for others, by a call of torch.distributed's."""
RankPosition = tuple[Progress, str]
"""Where a rank stands: its progress, and the place in its code."""


class HeartbeatServer:
    """The agent's end of its ranks' heartbeats. What they send is described in hpc_det.node.heartbeat."""

    def __init__(self, socket: AgentSocket) -> None:
        self._lines: dict[int, Line] = {}
        self._last: dict[int, Head] = {}
        self._news: dict[int, Head] = {}
        self._asked: set[int] = set()
        """Those that have not answered yet."""
        socket.on_heartbeat = self._take

    def ask(self, what: str) -> None:
        """A rank that owes an answer is not asked for progress again: what it does not read would pile up."""
        for rank, line in self._lines.items():
            if what == "stacks" or rank not in self._asked:
                line.send({"ask": what})
        self._asked = set(self._lines)

    def news(self) -> list[Head]:
        """What they sent since the last call."""
        news, self._news = list(self._news.values()), {}
        return news

    def force_stacks(self) -> None:
        """From ranks that do not answer: by a signal, which needs nothing of their interpreters."""
        for rank in self._asked:
            with suppress(OSError):
                os.kill(self._lines[rank].identity["pid"], STACKS_SIGNAL)  # its number here, also in a container

    def report_silent(self) -> None:
        """As news: these ranks have not answered."""
        for rank in self._asked:
            self._news[rank] = {**self._last[rank], "at": "no answer, a C call may keep the interpreter's lock"}

    def _take(self, line: Line, message: Head) -> None:
        """Raises BrokenRule."""
        rank = number_in(message, "heartbeat")
        _check(message)
        self._lines[rank] = line
        self._asked.discard(rank)
        self._last[rank] = self._news[rank] = message


def _check(message: Head) -> None:
    """Node 0 takes it as it is. Raises BrokenRule."""
    for name in ("steps", "alone", "batch"):
        number_in(message, name)
    if not isinstance(message.get("phase"), str) or not isinstance(message.get("at", ""), str):
        raise BrokenRule
    if type(message.get("warm")) is not bool:
        raise BrokenRule


class HangWatch:
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
        self._places: dict[int, RankPosition] = {}

    def take(self, news: Iterable[Head]) -> None:
        """What heartbeats have sent."""
        for message in news:
            progress = Progress(*(message[name] for name in Progress._fields))
            self._judge.take(message["heartbeat"], progress)
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


class HangJudge:
    def __init__(self, world_size: int, limit_s: int | None) -> None:
        """`limit_s` None: learned."""
        self._world_size = world_size
        self._fixed_s = limit_s
        self._ranks: dict[int, Progress] = {}
        self._still_s = 0.0
        self._longest_s = 0.0
        self._looked_at: float | None = None

    @property
    def round_s(self) -> float:
        """How often the ranks are to be asked."""
        shortest, longest = _ROUND_S
        return min(max(self.limit_s / _ROUNDS_PER_LIMIT, shortest), longest)

    @property
    def limit_s(self) -> float:
        """How long the ranks may stand still within a loop."""
        return float(self._fixed_s) if self._fixed_s else max(LEAST_S, TIMES_LONGEST * self._longest_s)

    @property
    def still_s(self) -> float:
        return self._still_s

    @property
    def ranks(self) -> Mapping[int, Progress]:
        return self._ranks

    def take(self, rank: int, progress: Progress) -> None:
        before = self._ranks.get(rank)
        if progress == before:
            return
        self._ranks[rank] = progress
        if before and before.warm:  # not what the first step or a save took
            self._longest_s = max(self._longest_s, self._still_s)
        self._still_s = 0.0

    def is_hung(self, now: float) -> bool:
        """`now`: by a clock that stands still while the job is suspended (hpc_det.node.suspension)."""
        self._still_s += 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        return self.stands_still

    @property
    def stands_still(self) -> bool:
        return len(self._ranks) == self._world_size and self._still_s > self._patience_s()

    def _patience_s(self) -> float:
        last = min(rank.steps for rank in self._ranks.values())
        return max(self._patience_of(rank) for rank in self._ranks.values() if rank.steps == last)

    def _patience_of(self, rank: Progress) -> float:
        if rank.phase in _FUNCTIONS:
            return self._patience_with_function(rank)
        if rank.warm:
            return self.limit_s
        return max(self.limit_s, _PATIENCE_S[rank.phase]) if rank.phase in _PATIENCE_S else float("inf")

    def _patience_with_function(self, rank: Progress) -> float:
        if self._fixed_s:
            return self._fixed_s
        has_been_done = rank.warm or any(other.steps > rank.steps for other in self._ranks.values())
        return max(self.limit_s, _FUNCTION_S) if has_been_done else float("inf")


def last_first(ranks: Mapping[int, RankPosition]) -> list[tuple[RankPosition, list[int]]]:
    """Ranks that stand at the same place together, those furthest behind first, and of these the odd ones out.

    In a pipeline several are odd: of equally many those that do not wait in a collective themselves.
    """
    groups: dict[tuple[int, str, str], list[int]] = {}
    for rank, (progress, place) in sorted(ranks.items()):
        groups.setdefault((progress.steps, progress.phase, place), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1]), _COLLECTIVES in group[0][2]))
    return [(ranks[together[0]], together) for _, together in ordered]


def sentence(still_s: float, groups: Iterable[tuple[RankPosition, list[int]]]) -> str:
    """What the failure says."""
    told = [f"{_named(ranks)}: {_where(progress)}, {place}" for (progress, place), ranks in groups]
    return f"no step for {still_s:.0f} s; " + "; ".join(told) + "; the ranks' logs contain the stacks of all threads"


def _where(progress: Progress) -> str:
    return (
        f"{progress.phase}, batch {progress.batch}" if progress.phase in ("training", "validation") else progress.phase
    )


def _named(ranks: list[int]) -> str:
    """ "ranks 0-2, 7" """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
