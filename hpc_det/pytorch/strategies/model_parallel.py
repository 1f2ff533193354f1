"""Which part of the data a rank trains on, where several ranks may train one model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError, shown


@dataclass
class ModelParallelUnit:
    """One rank's place: of `data_parallel_world_size` copies of the model it has a part of number
    `data_parallel_rank`.

    A subclass may have properties or methods without arguments in place of these attributes.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(distributed: Distributed) -> ModelParallelUnit:
    """For ranks that have a copy of the model each."""
    return ModelParallelUnit(distributed.rank, distributed.size, True, True)


def make_deepspeed_mpu(grid: Any) -> ModelParallelUnit:
    """For the grid of a PipelineEngine. Of the ranks that share a stage the first one loads data and reports."""
    is_first_of_stage = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=is_first_of_stage and grid.is_last_stage,
        should_build_data_loader=is_first_of_stage and (grid.is_first_stage or grid.is_last_stage),
    )


def plain(mpu: Any, ranks: int) -> ModelParallelUnit:
    """What a unit of any subclass says. Raises UsageError with all that cannot be so in a gang of so many ranks."""
    if not isinstance(mpu, ModelParallelUnit):
        raise UsageError(f"ModelParallelUnit: got {shown(mpu)}; pass one, or an object of a subclass")
    said = ModelParallelUnit(*(_said(mpu, field.name) for field in fields(ModelParallelUnit)))
    if problems := [f"{type(mpu).__name__}.{problem}" for problem in _problems(said, ranks)]:
        raise UsageError(problems)
    return said


def _said(mpu: ModelParallelUnit, name: str) -> Any:
    value = getattr(mpu, name, None)
    return value() if callable(value) else value


def _problems(said: ModelParallelUnit, ranks: int) -> Iterator[str]:
    wrong = list(_wrong_types(said))
    yield from wrong
    if wrong:
        return
    rank, size = said.data_parallel_rank, said.data_parallel_world_size
    if size < 1 or ranks % size:
        yield (
            f"data_parallel_world_size: {size} copies of the model do not have the same number of the {ranks} ranks; "
            f"use a divisor of {ranks}"
        )
    if size >= 1 and not 0 <= rank < size:
        yield f"data_parallel_rank: {rank} is not one of 0 to {size - 1}, as data_parallel_world_size is {size}"


def _wrong_types(said: ModelParallelUnit) -> Iterator[str]:
    for field, value in zip(fields(said), astuple(said), strict=True):
        expected: type = int if field.name.startswith("data_parallel") else bool
        if type(value) is not expected:
            yield f"{field.name}: {shown(value)} is {type(value).__name__}; expected {expected.__name__}"


def reporting_ranks(reports: Sequence[bool]) -> list[int]:
    """The ranks whose metrics count, from what each rank's unit says. Raises UsageError for none."""
    if not any(reports):
        raise UsageError("ModelParallelUnit: should_report_metrics is False on all ranks; let at least one report")
    return [rank for rank, does in enumerate(reports) if does]
