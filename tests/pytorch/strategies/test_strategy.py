"""The part of the data on which a rank trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.strategy import (
    ModelParallelUnit,
    checked_unit,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
    reporting_ranks,
)
from tests.facts import each_names, refused


class OfMethods(ModelParallelUnit):
    """A unit that overrides the attributes as methods."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def data_parallel_rank(self) -> int:  # type: ignore[override]
        return self._rank // 2

    @property
    def data_parallel_world_size(self) -> int:  # type: ignore[override]
        return 2

    def should_report_metrics(self) -> bool:  # type: ignore[override]
        return self._rank % 2 == 1

    @property
    def should_build_data_loader(self) -> bool:  # type: ignore[override]
        return self._rank % 2 == 0


def test_data_parallel_ranks_all_load_and_report() -> None:
    assert make_data_parallel_mpu(Distributed(rank=1, size=3)) == ModelParallelUnit(1, 3, True, True)


def grid(stage: int, stages: int, slice_rank: int = 0) -> Any:
    return SimpleNamespace(
        get_slice_parallel_rank=lambda: slice_rank,
        get_data_parallel_rank=lambda: 1,
        get_data_parallel_world_size=lambda: 2,
        is_first_stage=stage == 0,
        is_last_stage=stage == stages - 1,
    )


@pytest.mark.parametrize(
    ("stage", "slice_rank", "reports", "loads"),
    [
        (0, 0, False, True),
        (1, 0, False, False),
        (2, 0, True, True),
        (0, 1, False, False),
        (2, 1, False, False),
    ],
)
def test_of_a_pipeline_the_ends_load_and_the_last_stage_reports(
    stage: int, slice_rank: int, reports: bool, loads: bool
) -> None:
    assert make_deepspeed_mpu(grid(stage, 3, slice_rank)) == ModelParallelUnit(1, 2, reports, loads)


def test_a_pipeline_of_one_stage_loads_and_reports() -> None:
    assert make_deepspeed_mpu(grid(0, 1)) == ModelParallelUnit(1, 2, True, True)


def test_a_subclass_may_have_methods_and_properties() -> None:
    read = checked_unit(OfMethods(3), ranks=4)
    assert type(read) is ModelParallelUnit
    assert read == ModelParallelUnit(1, 2, True, False)


def test_what_is_no_unit_is_refused() -> None:
    with refused(UsageError, "ModelParallelUnit: ", 7):
        checked_unit(7, ranks=2)


def problems(*values: Any, ranks: int = 4) -> list[str]:
    with pytest.raises(UsageError) as caught:
        checked_unit(ModelParallelUnit(*values), ranks)
    return caught.value.problems


def test_every_wrong_type_is_named() -> None:
    facts = [
        ["ModelParallelUnit.data_parallel_rank: ", "'0'", "str", "int"],
        ["ModelParallelUnit.data_parallel_world_size: ", "2.0", "float", "int"],
        ["ModelParallelUnit.should_report_metrics: ", "1", "int", "bool"],
        ["ModelParallelUnit.should_build_data_loader: ", "None", "NoneType", "bool"],
    ]
    each_names(problems("0", 2.0, 1, None), *facts)


def test_every_impossible_number_is_named() -> None:
    facts = [
        ["ModelParallelUnit.data_parallel_world_size: ", "3 copies", "4 ranks"],
        ["ModelParallelUnit.data_parallel_rank: ", "3", "0 to 2", "data_parallel_world_size"],
    ]
    each_names(problems(3, 3, True, True), *facts)
    assert len(problems(-1, 2, True, True)) == len(problems(0, 0, True, True)) == len(problems(0, 8, True, True)) == 1


def test_the_reporting_ranks_are_those_that_say_so() -> None:
    assert reporting_ranks([False, True, False, True]) == [1, 3]
    with refused(UsageError, "should_report_metrics", False):
        reporting_ranks([False, False])
