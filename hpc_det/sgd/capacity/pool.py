"""A pool of single-node jobs: the one way to grow that every scheduler has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_det.errors import UsageError
from hpc_det.sgd.capacity.job import Jobs

if TYPE_CHECKING:
    from submitit.core.core import Executor


class Pool(Jobs):
    """`nodes`: (MIN, MAX). MAX jobs are kept queued or running; fewer than MIN nodes are not worth a start.

    All else is as with GangJob.
    """

    def __init__(self, executor: Executor | str, nodes: tuple[int, int], **options: Any) -> None:
        fewest, most = nodes
        if not 1 <= fewest <= most:
            raise UsageError(f"Pool(nodes=({fewest}, {most})): expected (MIN, MAX) with 1 <= MIN <= MAX")
        super().__init__(executor, jobs=most, nodes=1, **options)
        self.min_slots = fewest * self._slots_per_node
