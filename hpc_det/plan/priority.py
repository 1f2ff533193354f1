"""Conversion of Determined's priorities, 1 to 99 with the lower first, into those of Slurm and PBS.

42, Determined's default, corresponds to the schedulers' default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import Experiment

FIRST, USUAL, LAST = 1, 42, 99
"""The highest, the default and the lowest of Determined's priorities."""
_NICE_STEP = 100
"""Default step of `sbatch --nice` (sbatch(1))."""
_PBS_STEP = 10
"""Step of PBS for one step of a priority, so that all of them fit into -1024 to 1023 (qsub(1B), -p)."""


def nice_of(priority: float) -> int:
    """Return Slurm's nice value, higher is later. Only operators may set values below 0."""
    return round((priority - USUAL) * _NICE_STEP)


def from_nice(nice: int) -> float:
    """Return Determined's priority for a nice value of Slurm; it may lie outside of 1 to 99."""
    return USUAL + nice / _NICE_STEP


def pbs_priority_of(priority: float) -> int:
    """Return the priority for qsub -p, higher is earlier."""
    return round((USUAL - priority) * _PBS_STEP)


def from_pbs_priority(given: int) -> float:
    """Return Determined's priority for a priority of PBS; it may lie outside of 1 to 99."""
    return USUAL - given / _PBS_STEP


def priority_notes(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """Yield a note if the scheduler cannot give jobs the requested priority."""
    priority = experiment.resources.priority
    if priority is None:
        return
    if cluster.scheduler == "local":
        yield "resources.priority: no effect, since this machine has no queue"
    elif cluster.scheduler == "slurm" and priority < USUAL:
        yield (
            f"resources.priority: {priority} is ahead of the default {USUAL}, which only Slurm operators can "
            f"grant: jobs are submitted with {USUAL}; ask an operator for `scontrol update JobId=... "
            f"Nice={nice_of(priority)}`"
        )
