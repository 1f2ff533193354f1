"""Gangs that resume with another number of ranks: not bit-equal, but with the same records and the same sums."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import DataLoader, PyTorchCallback, PyTorchTrial, PyTorchTrialContext
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt


class Summing(PyTorchTrial):
    """One weight, whose gradient is the mean of the records' numbers, so that all results can be calculated by hand."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=1.0))
        self.seen = context.wrap_reducer(lambda records: sorted(records), name="seen", for_validation=False)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(torch.arange(48.0), batch_size=self.context.get_per_slot_batch_size())  # type: ignore[arg-type]

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(torch.arange(4.0), batch_size=1)  # type: ignore[arg-type]

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        for number in batch.tolist():
            self.seen.update(number)  # type: ignore[attr-defined]
        self.context.backward(self.model(batch.unsqueeze(1)).mean())
        self.context.step_optimizer(self.optimizer)
        return {"mean": batch.mean()}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch.unsqueeze(1)).mean()}

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


CONFIG: dict[str, Any] = {
    "searcher": {"max_length": {"batches": 4}},
    "scheduling_unit": 4,
    "optimizations": {"aggregation_frequency": 4},
    "min_validation_period": {"batches": 0},
    "min_checkpoint_period": {"batches": 0},
}


def attempt(distributed: Distributed, life: Life, stop_at: float) -> bool:
    return life.attempt(StopAt(stop_at), distributed).end == "stopped"


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1), (1, 4)])
def test_a_window_that_one_gang_began_another_ends(on_ranks: OnRanks, tmp_path: Path, before: int, after: int) -> None:
    """Four batches of twelve records make one optimizer step; the stop comes after the second of them."""
    life = Life.begin(tmp_path, Summing, hparams={"global_batch_size": 12}, **CONFIG)
    assert on_ranks(before, attempt, life, 3) == [True] * before
    assert on_ranks(after, attempt, life, math.inf) == [False] * after
    (weight,) = life.newest["state_dict.pth"]["models_state_dict"][0].values()
    assert weight.item() == -23.5, "the mean of 0 .. 47, which every record has a part in"
    (report,) = [metrics for kind, _, metrics in life.series if kind == "training"]
    # Batches of all ranks have the same weight: two batches are from the first gang, two from the second.
    first, second = 11.5, 35.5
    assert report["mean"] == pytest.approx((first * before + second * after) / (before + after))
    assert report["seen"] == list(range(48)), "nothing twice, nothing left out"


class StopsAtValidation(Summing):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.context.set_stop_requested(True)
        return super().evaluate_batch(batch)


def test_what_a_smaller_gang_has_trained_before_a_validation_is_reported_once(
    on_ranks: OnRanks, tmp_path: Path
) -> None:
    """The stop is at the start of the validation of batch 2, which the next gang makes and in which the trial ends."""
    life = Life.begin(
        tmp_path,
        StopsAtValidation,
        hparams={"global_batch_size": 12},
        **{**CONFIG, "min_validation_period": {"batches": 2}},
    )
    assert on_ranks(1, attempt, life, 3) == [True]
    assert on_ranks(2, attempt, life, math.inf) == [False] * 2
    assert [(kind, steps) for kind, steps, _ in life.series] == [("training", 2), ("validation", 2)]
