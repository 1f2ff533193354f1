from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.data import validation_data
from hpc_det.pytorch.deepspeed.runtime import in_our_words, prepare
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
    os.environ["PATH"] = "/nowhere"  # without ninja and a compiler
    train(new_engine(distributed, config(1)), 0, 1)
    return dist.is_initialized(), [*extensions.rglob("*")]


def test_no_operator_is_compiled(on_ranks: OnRanks, tmp_path: Path) -> None:
    assert on_ranks(2, compiled, tmp_path) == [(True, [])] * 2


def accelerator_after(distributed: Distributed) -> tuple[str, str]:
    from deepspeed.accelerator import cuda_accelerator, real_accelerator

    real_accelerator.ds_accelerator = cuda_accelerator.CUDA_Accelerator()  # as if chosen before the fork
    prepare(distributed)
    return real_accelerator.get_accelerator().device_name(), os.environ["DS_ACCELERATOR"]


def test_engines_are_where_the_rank_trains(on_ranks: OnRanks) -> None:
    assert on_ranks(1, accelerator_after) == [("cpu", "cpu")]


BATCH_SIZES = (
    "set two of train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps, and DeepSpeed works "
    "out the third"
)


def settings(**others: Any) -> dict[str, Any]:
    return {"train_batch_size": 4, **others}


def zero(stage: int, **others: Any) -> dict[str, Any]:
    return settings(zero_optimization={"stage": stage, **others})


FAILURES: dict[str, tuple[Any, str]] = {
    "batch sizes that contradict each other": (
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2},
        "train_batch_size 8 is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 2 x data-parallel "
        f"size 1, which follows from resources.slots_per_trial; change one of them, or {BATCH_SIZES}",
    ),
    "no batch size": (
        {"gradient_accumulation_steps": 2},
        f"neither train_batch_size nor train_micro_batch_size_per_gpu; {BATCH_SIZES}",
    ),
    "more accumulation than records": (
        {"train_batch_size": 2, "gradient_accumulation_steps": 4},
        "train_micro_batch_size_per_gpu comes to 0; train_batch_size must be at least gradient_accumulation_steps x "
        "data-parallel size, which follows from resources.slots_per_trial",
    ),
    "a micro batch larger than the batch": (
        {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4},
        "gradient_accumulation_steps comes to 0; train_batch_size must be at least train_micro_batch_size_per_gpu",
    ),
    "no records": (
        {"train_batch_size": 0},
        "train_batch_size comes to 0; use at least 1 for each of train_batch_size, train_micro_batch_size_per_gpu and "
        "gradient_accumulation_steps",
    ),
    "auto": (
        {"train_batch_size": "auto"},
        f'a batch size is not a number; only Transformers resolves "auto"; {BATCH_SIZES}',
    ),
    "a text": (
        {"train_micro_batch_size_per_gpu": "4"},
        f'a batch size is not a number; only Transformers resolves "auto"; {BATCH_SIZES}',
    ),
    "fp16 on a CPU": (
        settings(fp16={"enabled": True}),
        "fp16.enabled: this device cannot compute in fp16, as most CPUs cannot; use bf16.enabled instead, or neither",
    ),
    "an untested optimizer": (
        zero(1),
        "ZeRO with an optimizer that DeepSpeed has not tested it with, which Adam and AdamW are not; use one of those, "
        'or add "zero_allow_untested_optimizer": true',
    ),
    "offload": (
        zero(2, offload_optimizer={"device": "cpu"}),
        "zero_optimization.offload_optimizer with an optimizer given to deepspeed.initialize; name it in the section "
        'optimizer instead (with "torch_adam": true nothing is compiled), or add "zero_force_ds_cpu_optimizer": false',
    ),
    "a stage that is none": (
        zero(9, overlap="yes"),
        "stage: 9: Input should be 0, 1, 2, 3 or 3 (DeepSpeedZeroConfig)\n"
        "deepspeed config: overlap: 'yes': Extra inputs are not permitted (DeepSpeedZeroConfig)",
    ),
    "no file": (
        "/nowhere/ds_config.json",
        "no file /nowhere/ds_config.json; give deepspeed.initialize a dict, or a path that is there",
    ),
    "a map that is no dict": (
        MappingProxyType(settings()),
        "{'train_batch_size': 4} is a mapping but not a dict; give deepspeed.initialize a plain dict, for "
        "example overwrite_deepspeed_config(config, {})",
    ),
    "a pipeline with stage 2": (
        zero(2),
        "zero_optimization.stage: 2 and 3 do not go with a PipelineModule; use 1 or 0",
    ),
    "a pipeline with stage 3": (
        zero(3),
        "zero_optimization.stage: 2 and 3 do not go with a PipelineModule; use 1 or 0",
    ),
    "a pipeline of more stages than ranks": (
        settings(),
        "num_stages of a PipelineModule: 2 stages do not divide world size 1; set resources.slots_per_trial to "
        "a multiple of 2 (--local has one slot)",
    ),
    "no optimizer": (
        zero(1),
        "zero_optimization.stage: 1 shares out an optimizer, and there is none; give one to deepspeed.initialize, or "
        "add the section optimizer",
    ),
    "an op that cannot be compiled": (
        settings(optimizer={"type": "Adam", "params": {"lr": 0.1}}),
        "DeepSpeed's op fused_adam would have to be compiled, for which this machine lacks what it takes (ninja on "
        'PATH, a compiler); give "torch_adam": true in optimizer.params, or an optimizer of torch.optim to '
        "deepspeed.initialize, and none is needed",
    ),
}
WITHOUT_OPTIMIZER = ("no optimizer", "an op that cannot be compiled")


def provoked(distributed: Distributed) -> dict[str, str | None]:
    """Provoke each failure and return the message of `in_our_words`."""
    prepare(distributed)
    os.environ["PATH"] = "/nowhere"  # without ninja
    get_accelerator().is_fp16_supported = lambda: False  # some CPUs can compute in fp16
    return {name: _words(name, given) for name, (given, _) in FAILURES.items()}


def _words(name: str, given: Any) -> str | None:
    model: Any = torch.nn.Linear(2, 1)
    kind = torch.optim.SGD if "untested" in name else torch.optim.AdamW
    optimizer = None if name in WITHOUT_OPTIMIZER else kind(model.parameters(), lr=0.1)
    try:
        if "pipeline" in name:
            model = PipelineModule([model], num_stages=2 if "stages" in name else 1, loss_fn=torch.nn.MSELoss())
        deepspeed.initialize(model=model, optimizer=optimizer, config=given)
    except Exception as error:
        ours = in_our_words(error)
        return None if ours is None else str(ours)
    return "no error"


def test_what_users_meet_is_said_with_keys_and_remedy(on_ranks: OnRanks) -> None:
    [words] = on_ranks(1, provoked)
    assert words == {name: f"deepspeed config: {text}" for name, (_, text) in FAILURES.items()}


def test_a_repeating_loader_validates_as_often_as_the_loader_inside() -> None:
    data = validation_data(RepeatingLoader([10, 20, 30]), rank=0, size=1, seed=0)
    assert data.length == 3
    assert [list(data.batches()), list(data.batches())] == [[10, 20, 30], [10, 20, 30]]


@pytest.mark.parametrize("error", [ValueError("anything else"), TypeError("of a trial's own"), KeyError(0)])
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    assert in_our_words(error) is None
