"""Random orders for gangs on two nodes of Slurm, whose successor jobs continue."""

from __future__ import annotations

from tests.chaos.kills.pbs_plans import AGENTS, FIRST_AGENT, LAST_AGENT
from tests.chaos.kills.plans import ANOTHER_RANK, IN_RANKS, LOST, PREEMPTED, RANK, RANKS, Kill, Planner, Victim

JOB, EVERYTHING = Victim(("job",), (LOST, PREEMPTED)), Victim(("everything",), (LOST, PREEMPTED))
"""The job is the process of the batch script, which executes it. Slurm then ends the steps as it does in a preemption,
and an agent may write that down before it is killed.
"""
KINDS = ((RANK, ANOTHER_RANK, RANKS), (FIRST_AGENT, LAST_AGENT, AGENTS), (JOB,), (EVERYTHING,))


def one_of_each_kind(seed: int) -> list[Kill]:
    """In any order, each in an attempt of its own."""
    planner = Planner(seed)
    kinds = planner.random.sample(KINDS, len(KINDS))
    return [planner.any(victims, IN_RANKS) for victims in kinds]
