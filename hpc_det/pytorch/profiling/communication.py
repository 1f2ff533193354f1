"""How long a rank waits for gradients that it has computed: the part of their exchange that nothing hides.

DistributedDataParallel notes it by itself, in what its logger calls backward_comm_time and
backward_compute_comm_overlap_time (torch/csrc/distributed/c10d/logger.cpp, in nanoseconds), for some of the exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_det.pytorch.strategies.ddp import DataParallel

EVERY = 10
"""Exchanges. On a GPU, DDP waits for the end of one that it times; to ask for its times costs a few microseconds."""


class Exchange:
    """Of all models' gradients, once a batch."""

    def __init__(self, models: Sequence[DataParallel], aggregation: int) -> None:
        """`aggregation`: batches for each exchange."""
        self._models = models
        self._aggregation = aggregation
        self._exposed: list[float] = []
        self._time_some()

    def end_batch(self, number: int) -> None:
        """Before anybody resizes buckets."""
        if not (number + 1) % (self._aggregation * EVERY):
            self._exposed.append(sum(map(exposed_s, self._models)))
            self._time_some()

    def _time_some(self) -> None:
        """Said again and again, since with new buckets DDP begins anew."""
        for model in self._models:
            model._set_ddp_runtime_logging_sample_rate(EVERY)  # type: ignore[no-untyped-call]

    def take(self, batches: int) -> float | None:
        """Seconds in so many batches, by those that were timed since the last `take`; None where none was."""
        taken, self._exposed = self._exposed, []
        return sum(taken) / len(taken) * batches / self._aggregation if taken else None


def exposed_s(model: DataParallel) -> float:
    """In the last exchange that was timed; 0 before the first."""
    logger: Any = model.logger
    times: dict[str, int] = logger._get_ddp_logging_data().ints_map
    return (times.get("backward_comm_time", 0) - times.get("backward_compute_comm_overlap_time", 0)) / 1e9
