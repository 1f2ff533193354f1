"""Random orders for gangs on two nodes of PBS, whose jobs resume automatically."""

from __future__ import annotations

from tests.chaos.kills.plans import (
    ANOTHER_RANK,
    ATTEMPT_ENDS,
    FAILED,
    IN_AGENT,
    IN_RANKS,
    LAUNCHER,
    LOST,
    RANK,
    RANKS,
    TRAINS,
    Kill,
    Planner,
    Victim,
)

FIRST_AGENT, LAST_AGENT = Victim(("first agent",), (LOST, FAILED)), Victim(("last agent",), (LOST, FAILED))
AGENTS = Victim(("agent",), (LOST, FAILED))
STARTER = Victim(("starter",), (FAILED,))
JOB, EVERYTHING = Victim(("job",), (LOST,)), Victim(("everything",), (LOST,))
ALL = (RANK, ANOTHER_RANK, RANKS, LAUNCHER, FIRST_AGENT, LAST_AGENT, AGENTS, STARTER, JOB, EVERYTHING)


def one_after_the_other(seed: int) -> list[Kill]:
    """Kill twice, each time in another attempt."""
    planner = Planner(seed)
    return [planner.any(ALL, IN_RANKS) for _ in range(2)]


def twice_in_a_row(seed: int) -> list[Kill]:
    """Kill an agent or the job when an agent starts; then a rank or an agent in training, and the job while it handles
    that.
    """
    planner = Planner(seed)
    return [
        planner.any((FIRST_AGENT, LAST_AGENT, JOB), [IN_AGENT]),
        planner.any((RANK, LAST_AGENT), [TRAINS]),
        planner.any((JOB, EVERYTHING), [ATTEMPT_ENDS]).at_once,
    ]
