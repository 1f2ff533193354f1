"""Random orders for gangs on two nodes of Slurm, whose successor jobs continue."""

from __future__ import annotations

from tests.chaos.kills.pbs_plans import AGENTS, FIRST_AGENT, LAST_AGENT
from tests.chaos.kills.plans import ANOTHER_RANK, IN_RANKS, LOST, PREEMPTED, RANK, RANKS, Kill, Planner, Victim

JOB, EVERYTHING = Victim(("job",), (LOST, PREEMPTED)), Victim(("everything",), (LOST, PREEMPTED))
"""The job is the process of the batch script, which executes it. Slurm then ends the steps as in a preemption, which an
agent may record before it is killed.
"""
KINDS = ((RANK, ANOTHER_RANK, RANKS), (FIRST_AGENT, LAST_AGENT, AGENTS), (JOB,), (EVERYTHING,))


def one_of_each_kind(seed: int) -> list[Kill]:
    """Kill one of each kind, in random order, each in another attempt."""
    planner = Planner(seed)
    kinds = planner.random.sample(KINDS, len(KINDS))
    return [planner.any(victims, IN_RANKS) for victims in kinds]
