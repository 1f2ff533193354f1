"""Which part of the data a rank trains on, where several ranks may train one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_det.errors import UsageError


@dataclass
class ModelParallelUnit:
    """One rank's place: of `data_parallel_world_size` copies of the model it has a part of number
    `data_parallel_rank`.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def reporting_ranks(reports: Sequence[bool]) -> list[int]:
    """The ranks whose metrics count, from what each rank's unit says. Raises UsageError for none."""
    if not any(reports):
        raise UsageError("ModelParallelUnit: should_report_metrics is False on all ranks; let at least one report")
    return [rank for rank, does in enumerate(reports) if does]
