"""Hang detection: node 0 asks all ranks for their progress in rounds and, once none makes any, for their stacks.

Ranks that train together block together, so what counts is when any of them last made progress. How long they may make
none depends on what the ranks furthest behind are doing, because the others wait for these:

    a loop over batches             a limit that the user sets, or that is learned from the run
    the first step of such a loop   longer, because it may compile
    work between steps              hours, because it may save
    a function of the user's        no limit, unless the user sets one or another rank has finished the function

The decision (HangJudge) is pure arithmetic. Each agent asks the ranks of its node over their heartbeats, and keeps the
last answer of each.
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
"""Lowest learned limit, in seconds."""
TIMES_LONGEST = 20
"""The learned limit is this many times the longest pause after which the ranks made progress again."""
_PATIENCE_S: dict[str, float] = {
    "meeting": 300.0,  # after the last rank has joined, whose first collective takes milliseconds
    "between steps": 4 * 3600.0,
    "training": 3600.0,
    "validation": 3600.0,
}
"""Limits in seconds, by phase. For training and validation: before the first step of the loop.

A rank "outside" all phases has no limit.
"""
_FUNCTIONS = ("setup", "function", "loop")
"""Phases in which a function of the user's runs."""
_FUNCTION_S = 4 * 3600.0
"""Limit in seconds for a function of the user's that another rank has finished."""
_ROUNDS_PER_LIMIT = 20
"""Number of times that the ranks are asked for their progress within the limit."""
_ROUND_S = (0.25, 30.0)
"""Shortest and longest time between two such rounds, in seconds."""
_VERDICT_S = 10.0
"""Seconds for the stacks of all ranks to arrive."""
_COLLECTIVES = "(distributed_c10d.py:"
"""Part of the position of a rank that waits in a collective of torch.distributed."""
RankPosition = tuple[Progress, str]
"""A rank's progress, and its position in the code."""


class HeartbeatServer:
    """The agent's end of the heartbeats of its ranks; hpc_det.node.heartbeat describes their messages."""

    def __init__(self, socket: AgentSocket) -> None:
        self._lines: dict[int, Line] = {}
        """Connections of the heartbeats, keyed by rank."""
        self._last: dict[int, Head] = {}
        """Newest message of each rank."""
        self._news: dict[int, Head] = {}
        """Newest message of each rank that `news` has not returned yet."""
        self._asked: set[int] = set()
        """Ranks that have not answered yet."""
        socket.on_heartbeat = self._take

    def ask(self, what: str) -> None:
        """Ask every rank for `what`: "progress" or "stacks"."""
        for rank, line in self._lines.items():
            # A blocked rank does not read, so questions for it would pile up in the connection.
            if what == "stacks" or rank not in self._asked:
                line.send({"ask": what})
        self._asked = set(self._lines)

    def ask_one(self, rank: int) -> None:
        """Ask a rank of this node for its progress, unless it has not answered yet or is not connected."""
        if rank in self._lines and rank not in self._asked:
            self._lines[rank].send({"ask": "progress"})
            self._asked.add(rank)

    def news(self) -> list[Head]:
        """Return the newest message of each rank that has sent any since the last call."""
        news, self._news = list(self._news.values()), {}
        return news

    def force_stacks(self) -> None:
        """Send STACKS_SIGNAL to the ranks that do not answer; its handler does not need their interpreters."""
        for rank in self._asked:
            with suppress(OSError):
                # The kernel has translated the process id into this node's, also for a rank in a container.
                os.kill(self._lines[rank].identity["pid"], STACKS_SIGNAL)

    def report_silent(self) -> None:
        """Add a message to the news for each rank that has not answered, with its last known progress."""
        for rank in self._asked:
            self._news[rank] = {**self._last[rank], "at": "no answer: a C call may hold the interpreter's lock"}

    def _take(self, line: Line, message: Head) -> None:
        """Record a rank's message. Raises BrokenRule."""
        rank = number_in(message, "heartbeat")
        _check(message)
        self._lines[rank] = line
        self._asked.discard(rank)
        self._last[rank] = self._news[rank] = message


def _check(message: Head) -> None:
    """Raise BrokenRule if the message is invalid."""
    # Agents pass the message on to node 0, which does not check it again.
    for name in ("steps", "alone", "batch"):
        number_in(message, name)
    if not isinstance(message.get("phase"), str) or not isinstance(message.get("at", ""), str):
        raise BrokenRule
    if type(message.get("warm")) is not bool:
        raise BrokenRule


class HangWatch:
    """Node 0's hang detection: it collects the ranks' progress and returns the failure of a gang that hangs."""

    def __init__(self, plan: JobPlan, hosts: Sequence[str], ask_all: Callable[[str], None], clock: AwakeClock) -> None:
        """`hosts`: the gang's nodes, by rank. `ask_all`: asks every rank for "progress" or "stacks".

        `clock` must not count suspensions.
        """
        self._plan = plan
        self._hosts = hosts
        self._ask_all = ask_all
        self._clock = clock
        self._judge = HangJudge(plan.world_size, plan.hang_timeout_s)
        self._next_round = 0.0 if plan.hang_timeout_s != 0 else float("inf")
        """Seconds on the clock when the ranks are asked next; infinity if hang detection is disabled."""
        self._stacks_at: float | None = None
        """Seconds on the clock when stacks were requested; None if they were not."""
        self._places: dict[int, RankPosition] = {}
        """Positions of the ranks that have sent their stacks."""

    def take(self, news: Iterable[Head]) -> None:
        """Record the messages of heartbeats."""
        for message in news:
            progress = Progress(*(message[name] for name in Progress._fields))
            self._judge.take(message["heartbeat"], progress)
            if "at" in message:
                self._places[message["heartbeat"]] = (progress, message["at"])

    def failure(self) -> Failure | None:
        """Return the failure of a gang that hangs, once its ranks have sent their positions; called every second."""
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
        """Return the failure once all positions are known, or at `until`; None if a rank has made progress since."""
        if len(self._places) < self._plan.world_size and now < until:
            return None
        self._stacks_at = None
        unknown = {rank: (progress, "no answer from its node") for rank, progress in self._judge.ranks.items()}
        groups = last_first(unknown | self._places)
        self._places = {}
        if not self._judge.stands_still:
            print("hpc-det: ranks that seemed to hang have made progress again", file=sys.stderr, flush=True)
            return None
        rank = groups[0][1][0]
        host = self._hosts[rank // self._plan.ranks_per_node]
        message = sentence(self._judge.still_s, groups)
        return Failure(rank=rank, host=host, time=time.time(), message=message, hung=True)


class HangJudge:
    """Decides from the progress of all ranks whether the gang hangs."""

    def __init__(self, world_size: int, limit_s: int | None) -> None:
        """`limit_s`: the user's limit in seconds; None: learn it."""
        self._world_size = world_size
        self._fixed_s = limit_s
        self._ranks: dict[int, Progress] = {}
        self._still_s = 0.0
        """Seconds since the last progress of any rank, as of `_looked_at`."""
        self._longest_s = 0.0
        """Longest such time that ended with progress, without first steps and saves."""
        self._looked_at: float | None = None
        """Seconds on the clock of the last call of `is_hung`."""

    @property
    def round_s(self) -> float:
        """Seconds between two rounds of questions to the ranks."""
        shortest, longest = _ROUND_S
        return min(max(self.limit_s / _ROUNDS_PER_LIMIT, shortest), longest)

    @property
    def limit_s(self) -> float:
        """Seconds for which the ranks may make no progress within a loop over batches, after its first step."""
        return float(self._fixed_s) if self._fixed_s else max(LEAST_S, TIMES_LONGEST * self._longest_s)

    @property
    def still_s(self) -> float:
        """Seconds since the last progress of any rank."""
        return self._still_s

    @property
    def ranks(self) -> Mapping[int, Progress]:
        return self._ranks

    def take(self, rank: int, progress: Progress) -> None:
        """Record the progress of a rank."""
        before = self._ranks.get(rank)
        if progress == before:
            return
        self._ranks[rank] = progress
        if before and before.warm:  # do not learn from first steps and saves, which take longer
            self._longest_s = max(self._longest_s, self._still_s)
        self._still_s = 0.0

    def is_hung(self, now: float) -> bool:
        """Return whether the gang hangs.

        `now`: seconds on a clock that excludes suspensions (hpc_det.node.suspension).
        """
        self._still_s += 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        return self.stands_still

    @property
    def stands_still(self) -> bool:
        """True if all ranks have reported, and none has made progress for longer than allowed."""
        return len(self._ranks) == self._world_size and self._still_s > self._patience_s()

    def _patience_s(self) -> float:
        """Return the longest limit of the ranks that are furthest behind."""
        steps = [rank.steps for rank in self._ranks.values()]
        last, others_are_ahead = min(steps), max(steps) > min(steps)
        return max(self._patience_of(rank, others_are_ahead) for rank in self._ranks.values() if rank.steps == last)

    def _patience_of(self, rank: Progress, others_are_ahead: bool) -> float:
        """Return the seconds for which this rank, one of those furthest behind, may make no progress."""
        if rank.phase in _FUNCTIONS:
            return self._patience_with_function(rank, others_are_ahead)
        if rank.warm:
            return self.limit_s
        return max(self.limit_s, _PATIENCE_S[rank.phase]) if rank.phase in _PATIENCE_S else float("inf")

    def _patience_with_function(self, rank: Progress, others_are_ahead: bool) -> float:
        """Return the limit of a rank inside a function of the user's."""
        if self._fixed_s:
            return self._fixed_s
        return max(self.limit_s, _FUNCTION_S) if rank.warm or others_are_ahead else float("inf")


def last_first(ranks: Mapping[int, RankPosition]) -> list[tuple[RankPosition, list[int]]]:
    """Group the ranks by position; first the groups furthest behind, then smaller groups before larger ones.

    A small group is more likely the cause. In a pipeline several groups are small: of equal ones, those that do not
    wait in a collective come first.
    """
    groups: dict[tuple[int, str, str], list[int]] = {}
    for rank, (progress, place) in sorted(ranks.items()):
        groups.setdefault((progress.steps, progress.phase, place), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], len(group[1]), _COLLECTIVES in group[0][2]))
    return [(ranks[together[0]], together) for _, together in ordered]


def sentence(still_s: float, groups: Iterable[tuple[RankPosition, list[int]]]) -> str:
    """Return the message of the failure."""
    parts = [f"{_named(ranks)}: {_where(progress)}, {place}" for (progress, place), ranks in groups]
    return f"no step for {still_s:.0f} s; " + "; ".join(parts) + "; the ranks' logs contain the stacks of all threads"


def _where(progress: Progress) -> str:
    return (
        f"{progress.phase}, batch {progress.batch}" if progress.phase in ("training", "validation") else progress.phase
    )


def _named(ranks: list[int]) -> str:
    """Return the ranks as text, such as "ranks 0-2, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    numbers = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
