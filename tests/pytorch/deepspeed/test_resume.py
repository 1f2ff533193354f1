"""An engine that is stopped at any batch and resumed ends with the same bits as one that was not stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import UsageError
from tests.distributed.ranks import OnRanks
from tests.facts import unnamed
from tests.pytorch.trials import StopAt, differences

ACCUMULATING = [*(("Zero", stage, 4) for stage in (0, 1, 2, 3)), *(("Piped", stage, 4) for stage in (0, 1))]
NOT_ACCUMULATING = [("Zero", 3, 1), ("Piped", 1, 1)]
OTHERS = [*(("Zero", stage, 1) for stage in (0, 1, 2)), ("Piped", 0, 1)]
FEW_BATCHES = {"searcher": {"max_length": {"batches": 9}}}


def resumed(distributed: Distributed, folder: Path, kind: str, hparams: dict[str, Any], stops: list[int]) -> list[str]:
    """Return the values that differ between the stopped and the undisturbed run, which must save the same things."""
    from tests.pytorch.deepspeed import trials
    from tests.pytorch.deepspeed.life import life_of, newest

    trial_class = getattr(trials, kind)
    whole = life_of(distributed, folder / "whole", trial_class, hparams, **FEW_BATCHES)
    whole.attempt(StopAt(), distributed)
    life = life_of(distributed, folder / "stopped", trial_class, hparams, **FEW_BATCHES)
    ends = [life.attempt(StopAt(tick), distributed).end for tick in stops]
    ends.append(life.attempt(StopAt(), distributed).end)
    assert ends == ["stopped"] * len(stops) + ["finished"]
    distributed.barrier()
    assert life.series == whole.series
    assert whole.steps("training")[-1] == 9
    return differences(newest(life), newest(whole))


def refusal(distributed: Distributed, folder: Path, kind: str, hparams: dict[str, Any]) -> str:
    from tests.pytorch.deepspeed import trials
    from tests.pytorch.deepspeed.life import life_of

    with pytest.raises(UsageError) as raised:
        life_of(distributed, folder / "refused", getattr(trials, kind), hparams).attempt(StopAt(), distributed)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "stage", "accumulation"),
    [*ACCUMULATING, *NOT_ACCUMULATING, *(pytest.param(*other, marks=pytest.mark.long) for other in OTHERS)],
)
def test_stops_change_no_bit(on_ranks: OnRanks, tmp_path: Path, kind: str, stage: int, accumulation: int) -> None:
    stops = random.Random(f"{kind} {stage} {accumulation}").sample(range(2, 8), 2)
    hparams = {"stage": stage, "accumulation": accumulation}
    assert on_ranks(2, resumed, tmp_path, kind, hparams, stops) == [[], []]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_config_of_a_subclass_of_dict_is_saved_as_a_dict(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(1, resumed, tmp_path, "OfAttributes", {"stage": stage}, [4]) == [[]]


@pytest.mark.parametrize(("kind", "stage"), [("Zero", 2), ("Piped", 1)])
def test_stops_of_four_ranks_change_no_bit(on_ranks: OnRanks, tmp_path: Path, kind: str, stage: int) -> None:
    """Two pipelines of two stages each."""
    assert on_ranks(4, resumed, tmp_path, kind, {"stage": stage, "accumulation": 2}, [4]) == [[]] * 4


def test_a_pipeline_in_bf16_is_exact_with_zero_1_and_refused_without(on_ranks: OnRanks, tmp_path: Path) -> None:
    hparams = {"stage": 1, "accumulation": 2}
    assert on_ranks(2, resumed, tmp_path, "PipedInBf16", hparams, [4]) == [[], []]
    for said in on_ranks(2, refusal, tmp_path, "PipedInBf16", {**hparams, "stage": 0}):
        assert unnamed(said, "deepspeed config: bf16.enabled", "zero_optimization.stage 0", "stage 1") == []


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stops_in_bf16_change_no_bit(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    assert on_ranks(2, resumed, tmp_path, "InBf16", {"stage": stage, "accumulation": 2}, [4]) == [[], []]


@pytest.mark.parametrize("stage", [0, 2])
def test_what_was_frozen_on_the_way_stays_so(on_ranks: OnRanks, tmp_path: Path, stage: int) -> None:
    """46 records in batches of 12 are almost four batches per epoch."""
    assert on_ranks(2, resumed, tmp_path, "Freezing", {"stage": stage, "accumulation": 2}, [7]) == [[], []]


def test_the_first_batch_after_a_resume_may_be_skipped(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, resumed, tmp_path, "Skipping", {"accumulation": 2}, [3]) == [[], []]
