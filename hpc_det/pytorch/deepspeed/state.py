"""What a checkpoint of a DeepSpeedTrial holds beside the engines' shards, and how it comes back.

rank-R.pth      each rank: random generators, callbacks, the open windows of metrics and reducers, the lengths of event
                files, what is frozen or in eval mode, buffers, which data-parallel ranks do not share
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.content import load
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.distributed.rng import rng_state
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.state.state import open_state, rank_file, restore_open
from hpc_det.pytorch.strategies.model_parallel import reporting_ranks
from hpc_det.pytorch.strategies.modes import modes, set_modes
from hpc_det.pytorch.trial.callback import Callbacks


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
