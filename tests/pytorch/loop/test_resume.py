"""A run that is stopped anywhere and resumed has the same bits as an undisturbed one, for every way to train."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import DataLoader, PyTorchTrialContext
from hpc_det.pytorch.state.state import rank_state
from hpc_det.pytorch.strategies import pytorch_strategy
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt, Tiny, assert_same


class Augmented(Dataset[Any]):
    """Records with noise from every common random generator."""

    def __init__(self, records: int) -> None:
        self._inputs = torch.randn(records, 5, generator=torch.Generator().manual_seed(records))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = self._inputs[number]
        noise = 0.1 * (random.random() + np.random.random() + torch.rand(()))
        return (inputs + noise).float(), inputs.sum(dim=0, keepdim=True)


class EveryWay(Tiny):
    """A trial whose hyperparameters select the way to train."""

    rate = 0.01

    def __init__(self, context: PyTorchTrialContext) -> None:
        if context.get_hparam("amp"):
            context.experimental.use_amp(torch.float16)
        super().__init__(context)

    def loader(self, records: int, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            Augmented(records),
            batch_size=self.context.get_per_slot_batch_size(),
            shuffle=shuffle and self.context.get_hparam("shuffle"),
            num_workers=self.context.get_hparam("workers"),
        )


WAYS = itertools.product([1, 2, 4], [True, False], [0, 2], [1, 4], [True, False])
EVERY_TWO = {
    (1, True, 0, 4, True),
    (1, False, 2, 1, False),
    (2, True, 0, 1, False),
    (2, False, 2, 4, True),
    (4, True, 2, 4, False),
    (4, False, 0, 1, True),
}
"""A selection of ways to train in which every pair of settings occurs together."""


def begin(path: Path, hparams: dict[str, Any], aggregation: int) -> Life:
    optimizations = {"aggregation_frequency": aggregation}
    return Life.begin(path, EveryWay, {**hparams, "global_batch_size": 4}, optimizations=optimizations)


def live(distributed: Distributed, undisturbed: Life, stopped: Life, ticks: list[int]) -> list[bool]:
    """Run one trial without a stop, and the other one with a stop in all attempts except the last."""
    undisturbed.attempt(StopAt(), distributed)
    return [stopped.attempt(StopAt(tick, look=2), distributed).end == "stopped" for tick in [*ticks, math.inf]]


@pytest.mark.parametrize(
    ("ranks", "shuffle", "workers", "aggregation", "amp"),
    [pytest.param(*way, marks=() if way in EVERY_TWO else pytest.mark.long) for way in WAYS],
)
def test_stops_at_random_batches_change_no_bit(
    on_ranks: OnRanks, tmp_path: Path, ranks: int, shuffle: bool, workers: int, aggregation: int, amp: bool
) -> None:
    hparams = {"shuffle": shuffle, "workers": workers, "amp": amp}
    undisturbed, stopped = (begin(tmp_path / name, hparams, aggregation) for name in ("undisturbed", "stopped"))
    draws = random.Random(f"{ranks} {shuffle} {workers} {aggregation} {amp}")
    # 18 batches: one stop up to the first validation, inside an aggregation window or not, and one after the resume.
    ticks = [draws.randint(1, 6), draws.randint(1, 9)]
    for answers in on_ranks(ranks, live, undisturbed, stopped, ticks):
        assert answers == [True, True, False]
    assert_same(stopped, undisturbed)


def test_a_checkpoint_of_an_older_version_knows_nothing_of_event_files_and_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, whole = Life.begin(tmp_path / "cut"), Life.begin(tmp_path / "whole")
    with monkeypatch.context() as older:
        older.setattr(pytorch_strategy, "rank_state", _older)
        cut.attempt(StopAt(7))
    cut.attempt()
    whole.attempt()
    assert_same(cut, whole)


def _older(*arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in rank_state(*arguments).items() if name not in ("tensorboard", "fusion")}
