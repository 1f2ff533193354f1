"""A gang of another size resumes a checkpoint, with the same records and the same state."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from tests.distributed.ranks import OnRanks
from tests.facts import unnamed
from tests.pytorch.trials import StopAt

GLOBAL = 12
"""Records of a batch, for any number of ranks."""
AFTER_A_REPORT = 5
"""A tick after a report: a report that combines batches of two gang sizes would weigh them differently."""
LENGTH = {"searcher": {"max_length": {"batches": 7}}}


def attempted(distributed: Distributed, folder: Path, stage: int, stop: int | None) -> Any:
    """Return the series of metrics after an attempt in `folder`, which may contain earlier attempts, or the error."""
    from hpc_det.store.folders import TrialFolder
    from tests.pytorch.deepspeed import trials
    from tests.pytorch.deepspeed.life import life_of

    accumulation = GLOBAL // (3 * distributed.size)
    life = life_of(distributed, folder, trials.InParts, {"stage": stage, "accumulation": accumulation}, **LENGTH)
    assert TrialFolder(folder).checkpoints.is_dir()
    try:
        life.attempt(StopAt(stop) if stop else StopAt(), distributed)
    except (HpcDetError, UsageError) as error:
        return str(error)
    return life.series


@pytest.mark.parametrize(
    ("stage", "ranks"),
    [
        (0, (2, 1)),
        pytest.param(1, (1, 2), marks=pytest.mark.long),
        pytest.param(2, (2, 1), marks=pytest.mark.long),
        (3, (2, 1)),
    ],
)
def test_training_goes_on_with_other_ranks(
    on_ranks: OnRanks, tmp_path: Path, stage: int, ranks: tuple[int, int]
) -> None:
    """The number of accumulated micro batches changes too: batches have the same records, sums another order."""
    undisturbed = on_ranks(ranks[0], attempted, tmp_path / "whole", stage, None)[0]
    on_ranks(ranks[0], attempted, tmp_path / "stopped", stage, AFTER_A_REPORT)
    resumed = on_ranks(ranks[1], attempted, tmp_path / "stopped", stage, None)[0]
    assert [record[:2] for record in resumed] == [record[:2] for record in undisturbed]
    for (_, _, metrics), (_, _, expected) in zip(resumed, undisturbed, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-4)
    assert not [*(tmp_path / "stopped" / "checkpoints").glob(".partial*")]


def test_another_stage_is_refused_before_anything_changes(on_ranks: OnRanks, tmp_path: Path) -> None:
    on_ranks(1, attempted, tmp_path, 1, 3)
    (said,) = on_ranks(1, attempted, tmp_path, 2, None)
    assert unnamed(said, "ZeRO stage 1", 2, "1 slot") == []


def counted(distributed: Distributed, folder: Path, stop: float) -> list[float]:
    """Return `batches` of each training report."""
    from tests.pytorch.deepspeed import trials
    from tests.pytorch.deepspeed.life import life_of

    hparams = {"stage": 1, "accumulation": 4 // distributed.size}
    life = life_of(distributed, folder, trials.Counted, hparams, searcher={"max_length": {"batches": 4}})
    life.attempt(StopAt(stop), distributed)
    return [metrics["batches"] for kind, _, metrics in life.series if kind == "training"]


@pytest.mark.long
def test_reducers_of_all_ranks_go_on_of_a_pipeline_too(on_ranks: OnRanks, tmp_path: Path) -> None:
    """Two batches of four ranks, of which two report, and two batches of two ranks, which both report."""
    on_ranks(4, counted, tmp_path, 3)
    assert on_ranks(2, counted, tmp_path, math.inf)[0] == [2 * 4 + 2 * 2]
