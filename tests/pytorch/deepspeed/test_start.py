from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.deepspeed.start import prepare
from tests.distributed.ranks import OnRanks
from tests.pytorch.deepspeed.engines import config, new_engine, train

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def lives_of_one_that_nobody_launched(_: Distributed, stages: list[int]) -> list[tuple[list[float], bool]]:
    for name in OF_LAUNCHERS:
        os.environ.pop(name, None)
    lives = []
    for stage in stages:
        alone = Distributed()
        alone.start()
        prepare(alone)
        prepare(alone)
        losses = train(new_engine(alone, config(stage)), 0, 2)
        alone.stop()
        lives.append((losses, dist.is_initialized()))
    return lives


def test_one_rank_needs_no_launcher_and_leaves_no_process_group(on_ranks: OnRanks) -> None:
    [lives] = on_ranks(1, lives_of_one_that_nobody_launched, [0, 2, 0])
    assert [is_left for _, is_left in lives] == [False] * 3
    assert lives[0] == lives[2]


def compiled(distributed: Distributed, extensions: Path) -> tuple[bool, list[Any]]:
    os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions)
    os.environ["PATH"] = "/nowhere"  # no ninja, no compiler
    train(new_engine(distributed, config(1)), 0, 1)
    return dist.is_initialized(), [*extensions.rglob("*")]


def test_no_operator_is_compiled(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, compiled, tmp_path) == [(True, [])] * 2


def accelerator_after(distributed: Distributed) -> tuple[str, str]:
    from deepspeed.accelerator import cuda_accelerator, real_accelerator

    real_accelerator.ds_accelerator = cuda_accelerator.CUDA_Accelerator()  # chosen before this process forked
    prepare(distributed)
    return real_accelerator.get_accelerator().device_name(), os.environ["DS_ACCELERATOR"]


def test_engines_are_where_the_rank_trains(on_ranks: OnRanks) -> None:
    assert on_ranks(1, accelerator_after) == [("cpu", "cpu")]
