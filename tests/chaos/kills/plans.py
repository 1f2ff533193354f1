"""Random orders: a seed determines the kills of one training, each with the causes with which its attempt may end."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.chaos.kills.orders import Moment, Order

FAILED, LOST, FINISHED, PREEMPTED, CANCELLED = "failed", "node lost", "finished", "preempted", "cancelled"


@dataclass(frozen=True)
class Kill:
    what: str
    """A row of the table."""
    order: Order
    ends: tuple[str, ...]
    """The causes with which the attempt may end."""
    ends_job: bool = False

    @property
    def at_once(self) -> Kill:
        """The same kill, but in the attempt of the kill before it, while the product still handles that one."""
        return replace(self, order=replace(self.order, at_once=True))


def most_failures(kills: Sequence[Kill]) -> int:
    """Return the largest number of attempts that may end as failed: nothing else is charged to max_restarts."""
    attempts = list[list[Kill]]()
    for kill in kills:
        if not kill.order.at_once:
            attempts.append([])
        attempts[-1].append(kill)
    return sum(any(FAILED in kill.ends for kill in attempt) for attempt in attempts)


@dataclass(frozen=True)
class Victim:
    who: tuple[str, ...]
    ends: tuple[str, ...]
    signal: int = signal.SIGKILL
    ends_job: bool = False

    def __str__(self) -> str:
        who = " and ".join("rank" if each.endswith("rank") else each for each in self.who)
        return f"{who} {'killed' if self.signal == signal.SIGKILL else 'asked to end'}"


RANK = Victim(("its rank",), (FAILED,))
ANOTHER_RANK = Victim(("another rank",), (FAILED,))
RANKS = Victim(("ranks",), (FAILED,))
LAUNCHER = Victim(("launcher",), (FAILED,))
AGENT = Victim(("agent",), (FAILED,))
JOB = Victim(("job",), (LOST,), ends_job=True)
JOB_AND_AGENT = Victim(("job", "agent"), (LOST,), ends_job=True)
EVERYTHING = Victim(("everything",), (LOST,), ends_job=True)
LOCAL = (RANK, ANOTHER_RANK, RANKS, LAUNCHER, AGENT, JOB, JOB_AND_AGENT, EVERYTHING)
"""Victims on one node. A job that is killed there does not resume automatically."""

RANK_ASKED = Victim(("its rank",), (PREEMPTED,), signal.SIGTERM)
AGENT_ASKED = Victim(("agent",), (PREEMPTED,), signal.SIGTERM)
JOB_ASKED = Victim(("job",), (CANCELLED,), signal.SIGTERM, ends_job=True)
ASKED_TO_END = (RANK_ASKED, AGENT_ASKED, JOB_ASKED)


@dataclass(frozen=True)
class Time:
    """A phase of an attempt."""

    functions: Sequence[str]
    most: int = 1
    """The largest count of a moment; the smallest is 1."""
    rank: int | None = None
    """None: any; NO_RANK: in another process."""
    ends: tuple[str, ...] = ()
    """Causes that are possible in this phase in addition to those of the victim."""


NO_RANK = -1
HAS_FINISHED = (FINISHED,)
STARTS = Time(
    (
        "hpc_det.node.heartbeat:Heartbeat.__init__",
        "hpc_det.distributed.collectives:Distributed.start",
        "hpc_det.pytorch.loop.loop:Loop._begin",
    )
)
TRAINS = Time(("model_def:StoryTrial.train_batch",), most=14)
VALIDATES = Time(("model_def:StoryTrial.evaluate_batch",))
SAVES = Time(("hpc_det.checkpoint.async_save:AsyncSave.write",))
COMMITS = Time(
    (
        "hpc_det.checkpoint.checkpoints:CheckpointContext._commit",
        "hpc_det.checkpoint.staging:Staging.commit",
        "hpc_det.distributed.metrics:MetricsLog.report",
    ),
    rank=0,
)
ENDS = Time(("hpc_det.pytorch.loop.run:train", "hpc_det.distributed.collectives:Distributed.stop"), ends=HAS_FINISHED)
IN_RANKS = (STARTS, TRAINS, VALIDATES, SAVES, COMMITS)

IN_AGENT = Time(
    ("hpc_det.launch.attempt_on_node:supervisor_of_node", "hpc_det.store.attempt:Attempt.to_env"), rank=NO_RANK
)
JOB_BEGINS = Time(("hpc_det.search.journal:SearchJournal.claim",), rank=NO_RANK)
ATTEMPT_BEGINS = Time(
    ("hpc_det.store.journal:Journal.started", "hpc_det.launch.job.attempts:say_attempt_begins"), rank=NO_RANK
)
JOURNAL_ENDED = "hpc_det.store.journal:Journal.ended"
ATTEMPT_ENDS = Time((JOURNAL_ENDED, "hpc_det.launch.job.attempts:decide"), rank=NO_RANK, ends=(FAILED, FINISHED))
SEARCH_IS_NOTIFIED = Time(("hpc_det.search.journal:SearchJournal.leave",), rank=NO_RANK, ends=HAS_FINISHED)


def of_each_seed(plans: Mapping[Callable[[int], list[Kill]], int]) -> list[Any]:
    """Return one parameter per training: its plan and seed."""
    return [pytest.param(plan, seed, id=f"{plan.__name__}-{seed}") for plan in plans for seed in range(plans[plan])]


class Planner:
    def __init__(self, seed: int, *, ranks: int = 2) -> None:
        self.random = random.Random(seed)
        self._ranks = ranks

    def any(self, victims: Sequence[Victim], times: Sequence[Time]) -> Kill:
        return self.kill(self.random.choice(victims), self.random.choice(times))

    def kill(self, victim: Victim, time: Time) -> Kill:
        rank = self.random.randrange(self._ranks) if time.rank is None else time.rank
        moment = Moment(
            self.random.choice(time.functions),
            self.random.random() < 0.5,
            self.random.randint(1, time.most),
            None if rank == NO_RANK else rank,
        )
        order = Order(
            moment,
            tuple(self._named(who, rank) for who in victim.who),
            victim.signal,
            stops_first=victim.signal == signal.SIGKILL and self.random.random() < 0.3,
            stays=victim.who == ("job",) and victim.signal == signal.SIGKILL,
        )
        return Kill(str(victim), order, (*victim.ends, *time.ends), victim.ends_job)

    def _named(self, who: str, rank: int) -> str:
        match who:
            case "its rank":
                return "self"
            case "another rank":
                return f"rank {self.random.choice([other for other in range(self._ranks) if other != rank])}"
        return who


def one_after_the_other(seed: int, count: int = 3) -> list[Kill]:
    """Kill several times, each time in another attempt."""
    planner = Planner(seed)
    return [planner.any(LOCAL, IN_RANKS) for _ in range(count)]


def before_ranks_start(seed: int) -> list[Kill]:
    """Kill the job or its agent while they start; the last time, in training."""
    planner = Planner(seed)
    return [
        planner.any((JOB, EVERYTHING), [JOB_BEGINS, ATTEMPT_BEGINS]),
        planner.any((AGENT, EVERYTHING), [IN_AGENT]),
        planner.any((JOB, EVERYTHING), [ATTEMPT_BEGINS]).at_once,
        planner.any(LOCAL, [TRAINS]),
    ]


def twice_in_a_row(seed: int) -> list[Kill]:
    """Kill a process, then the job while it handles the end of that attempt; then kill once more."""
    planner = Planner(seed)
    first = planner.any((RANK, RANKS, LAUNCHER, AGENT), IN_RANKS)
    second = planner.any((JOB, EVERYTHING), [ATTEMPT_ENDS]).at_once
    is_written = second.order.moment == replace(second.order.moment, function=JOURNAL_ENDED, after=True)
    ends = (FAILED,) if is_written else (LOST,)
    return [replace(first, ends=ends), replace(second, ends=ends), planner.any(LOCAL, IN_RANKS)]


def at_the_end(seed: int) -> list[Kill]:
    """Kill when the training is complete, but that is not recorded yet."""
    planner = Planner(seed)
    of_ranks = planner.any((RANK, ANOTHER_RANK, EVERYTHING), [ENDS])
    of_job = planner.any((JOB, EVERYTHING), [replace(ATTEMPT_ENDS, ends=HAS_FINISHED), SEARCH_IS_NOTIFIED])
    return [planner.any(LOCAL, IN_RANKS), planner.random.choice([of_ranks, of_job])]


def asked_and_killed(seed: int) -> list[Kill]:
    """Request a stop, and kill during the save that follows; then only request a stop."""
    planner = Planner(seed)
    asked = planner.any(ASKED_TO_END, [TRAINS, VALIDATES])
    killed = planner.any(LOCAL, [SAVES, COMMITS]).at_once
    either = tuple(dict.fromkeys((*asked.ends, *killed.ends)))
    return [replace(asked, ends=either), replace(killed, ends=either), planner.any(ASKED_TO_END, [TRAINS, VALIDATES])]


def of_launchers(seed: int) -> list[Kill]:
    """Kill ranks that take seconds to start."""
    planner = Planner(seed)
    return [
        planner.kill(LAUNCHER, planner.random.choice([TRAINS, SAVES, COMMITS])),
        planner.any(LOCAL, [STARTS, VALIDATES, SAVES]),
    ]
