"""The memory of the first save is there before it comes: nothing is allocated while training stands still."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_det.checkpoint.pinned_staging import _Chunk
from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch import PyTorchTrialContext
from tests.distributed.ranks import OnRanks
from tests.pytorch.trials import Life, StopAt, Tiny

AT_THE_END: dict[str, Any] = {"min_validation_period": {"batches": 0}, "min_checkpoint_period": {"batches": 0}}


class WithAdam(Tiny):
    def wrap_schedulers(self, context: PyTorchTrialContext) -> None:
        context.optimizers.clear()
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters()))
        super().wrap_schedulers(context)


def in_the_stall(distributed: Distributed, life: Life, tick: float) -> list[str]:
    """The threads that were given memory."""
    threads, touch = [], _Chunk.fault_in

    def noted(chunk: _Chunk) -> None:
        threads.append(threading.current_thread().name)
        touch(chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Chunk, "fault_in", noted)
        life.attempt(StopAt(tick), distributed)
    assert life.checkpoints
    return threads


@pytest.mark.parametrize("tick", [3, math.inf])
@pytest.mark.parametrize("aggregation", [1, 2])
def test_memory_is_handed_out_behind_the_training(tmp_path: Path, aggregation: int, tick: float) -> None:
    """Also where the first save is that of a preemption."""
    optimizations = {"aggregation_frequency": aggregation}
    life = Life.begin(tmp_path, WithAdam, **AT_THE_END, optimizations=optimizations)
    assert {*in_the_stall(Distributed(), life, tick)} == {"warm"}


def test_of_several_ranks_too(on_ranks: OnRanks, tmp_path: Path) -> None:
    life = Life.begin(tmp_path, WithAdam, **AT_THE_END)
    assert [{*threads} for threads in on_ranks(2, in_the_stall, life, math.inf)] == [{"warm"}] * 2
