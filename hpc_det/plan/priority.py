"""Determined's priorities, 1 to 99 with the lower first, as Slurm and PBS have them.

Determined gives 42 to whoever says nothing. It stands for what the schedulers give then.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_det.config.cluster import Cluster
    from hpc_det.config.schema import Experiment

FIRST, USUAL, LAST = 1, 42, 99
_NICE_STEP = 100
"""What `sbatch --nice` takes off where it is given no value (sbatch(1))."""
_PBS_STEP = 10
"""So that all of them fit into -1024 to 1023 (qsub(1B), -p)."""


def nice_of(priority: float) -> int:
    """Slurm's, the higher the later. Below 0 is for operators."""
    return round((priority - USUAL) * _NICE_STEP)


def from_nice(nice: int) -> float:
    return USUAL + nice / _NICE_STEP


def pbs_priority_of(priority: float) -> int:
    """That of qsub -p, the higher the earlier."""
    return round((USUAL - priority) * _PBS_STEP)


def from_pbs_priority(given: int) -> float:
    return USUAL - given / _PBS_STEP


def priority_notes(experiment: Experiment, cluster: Cluster) -> Iterator[str]:
    """What of the experiment's priority its jobs will not have."""
    priority = experiment.resources.priority
    if priority is None:
        return
    if cluster.scheduler == "local":
        yield "resources.priority: has no effect: this machine has no queue"
    elif cluster.scheduler == "slurm" and priority < USUAL:
        yield (
            f"resources.priority: {priority} is ahead of the usual {USUAL}, which on Slurm is the site's operators' to "
            f"give: jobs are submitted with {USUAL}; ask an operator for `scontrol update JobId=... "
            f"Nice={nice_of(priority)}`"
        )
