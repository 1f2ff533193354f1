"""What a checkpoint of a DeepSpeedTrial holds, and how it comes back.

model0, model1, ...   the shards of each engine, by DeepSpeed's own names
engines.json          what a resume, also on another number of ranks, must know of each
rank-R.pth            each rank: random generators, callbacks, the open windows of metrics and reducers, the lengths of
                      event files, what is frozen or in eval mode, buffers, which data-parallel ranks do not share
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import PipelineEngine

from hpc_det.checkpoint.content import load
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.distributed.rng import rng_state
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.universal import engine_facts, load_engine
from hpc_det.pytorch.state.state import open_state, rank_file, restore_open
from hpc_det.pytorch.strategies.parameters import modes, set_modes
from hpc_det.pytorch.strategies.strategy import reporting_ranks
from hpc_det.pytorch.trial.callback import Callbacks

ENGINES = "engines.json"
_SHARD = re.compile(r"model\d+/(?:(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_\d+_(?:model|optim)_states\.pt")
"""Of one data-parallel rank, or what all of them have in common; see _get_ckpt_name in deepspeed/runtime/engine.py."""


# --- engines


def tag(number: int) -> str:
    """What DeepSpeed calls a checkpoint: a folder's name."""
    return f"model{number}"


def is_read_by(data_parallel_rank: int, name: str) -> bool:
    """Whether such a rank of the same gang loads a file. Of a pipeline's layers nobody says: each rank has others."""
    shard = _SHARD.fullmatch(name)
    return name == ENGINES or bool(shard and shard["rank"] in (None, str(data_parallel_rank)))


def settings(engine: Any) -> dict[str, Any]:
    """What an engine's shards hold beside tensors, as far as it is the user's own."""
    groups = getattr(engine.optimizer, "param_groups", [])
    return {
        "ds_config": engine.config,
        "lr_scheduler": engine.lr_scheduler and engine.lr_scheduler.state_dict(),
        "param_groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
    }


def expected(engine: Any) -> Iterator[Any]:
    """The tensors that this rank saves of an engine, file by file, as far as they are known without a save.

    As `_save_checkpoint` and `_save_zero_checkpoint` of deepspeed/runtime/engine.py have it. State dicts are views of
    what the engine has: nothing is copied or exchanged. The layers of pipelines and of mixtures of experts are left
    out, since their files are shared out among ranks, and so is what is on a disk.
    """
    has_one_model_file = not (isinstance(engine, PipelineEngine) or engine.has_moe_layers)
    if engine.save_non_zero_checkpoint and has_one_model_file:
        yield [engine.module.state_dict(), None if engine.zero_optimization() else _optimizer_state(engine)]
    if engine.save_zero_checkpoint:
        yield _optimizer_state(engine)


def _optimizer_state(engine: Any) -> Any:
    is_in_memory = engine.optimizer and not engine.zero_nvme_offload_optimizer()
    return engine.optimizer.state_dict() if is_in_memory else None


def save_facts(context: DeepSpeedTrialContext, folder: Path) -> None:
    """On rank 0."""
    if context.distributed.is_chief:
        write_json(folder / ENGINES, [engine_facts(engine) for engine in context.models])


def load_engines(context: DeepSpeedTrialContext, folder: Path, *, weights_alone: bool = False) -> None:
    """Collective: every engine as it was saved, or its weights alone. They must be fresh ones.

    Raises UsageError for engines that it cannot be done with, HpcDetError for damaged shards.
    """
    saved = facts(folder)
    if len(saved) != len(context.models):
        raise UsageError(f"{folder}: holds {len(saved)} engines, the trial wraps {len(context.models)}")
    aside = context.folder.checkpoints if context.folder else folder.parent
    for number, (engine, its_facts) in enumerate(zip(context.models, saved, strict=True)):
        shards = folder / tag(number)
        load_engine(engine, shards, its_facts, context.distributed, aside=aside, weights_alone=weights_alone)


def facts(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] | None = read_json(folder / ENGINES)
    if found is None:
        raise HpcDetError(f"{folder}: has no {ENGINES}, so it is no checkpoint of a DeepSpeedTrial; use one")
    return found


# --- ranks


def rank_state(context: DeepSpeedTrialContext, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
    return {
        "rng": rng_state(),
        "callbacks": callbacks.state(),
        **open_state(context, window),
        **modes(context.models),
        "buffers": _buffers(context),
    }


def stored_rank(folder: Path, context: DeepSpeedTrialContext) -> dict[str, Any]:
    """Rank 0's for a rank that the gang did not have."""
    own = folder / rank_file(context.distributed.rank)
    state: dict[str, Any] = load(own if own.exists() else folder / rank_file(0))
    return state


def restore_rank(
    folder: Path, ranks: int, context: DeepSpeedTrialContext, window: MetricWindow
) -> dict[str, Any] | None:
    """Everything of this rank but callbacks and generators, whose state is returned; None if the gang did not have it.

    In a gang of another size the first rank that reports takes over all open windows; those of ranks that did not
    report are empty, but for reducers.
    """
    gang = context.distributed
    own = stored_rank(folder, context)
    if ranks == gang.size or not context.use_pipeline_parallel:  # else the file may be of another stage
        set_modes(context.models, own)
    if gang.rank < ranks:
        context.tensorboard.cut(own.get("tensorboard", {}))  # which older checkpoints do not have
    if ranks == gang.size:
        restore_open(context, window, own)
        _set_buffers(context, own["buffers"])
    elif gang.rank == reporting_ranks(gang.gather_json(context.mpu.should_report_metrics))[0]:
        states = [load(folder / rank_file(rank)) for rank in range(ranks)]
        restore_open(context, window, *states)
    generators: dict[str, Any] = own["rng"]
    return generators if gang.rank < ranks else None


def _buffers(context: DeepSpeedTrialContext) -> dict[str, torch.Tensor]:
    """Of what a state_dict holds; DeepSpeed saves those of the first data-parallel rank."""
    return {
        f"{k}.{path}.{name}": buffer
        for k, engine in enumerate(context.models)
        for path, module in engine.module.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def _set_buffers(context: DeepSpeedTrialContext, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in _buffers(context).items():
            buffer.copy_(buffers[name])
