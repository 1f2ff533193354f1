"""The content of a DeepSpeedTrial's checkpoint, saved and restored.

model0, model1, ...   the shards of each engine, with DeepSpeed's own names
engines.json          facts about each engine that a resume needs, also on another number of ranks
rank-R.pth            for each rank: random generators, callbacks, metrics and reducers since the last report, lengths
                      of event files, frozen and eval modes, buffers, which data-parallel ranks do not share
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import PipelineEngine

from hpc_det.checkpoint.node_folders import rank_file
from hpc_det.checkpoint.rank_files import RankFiles
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.distributed.rng import rng_state
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.node.json_files import read_json, write_json
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.universal import engine_facts, load_engine
from hpc_det.pytorch.state.state import open_state, restore_open
from hpc_det.pytorch.strategies.parameters import modes, set_modes
from hpc_det.pytorch.strategies.strategy import reporting_ranks
from hpc_det.pytorch.trial.callback import Callbacks

ENGINES = "engines.json"
_SHARD = re.compile(r"model\d+/(?:(?:bf16_)?zero_pp_rank_(?P<rank>\d+)_)?mp_rank_\d+_(?:model|optim)_states\.pt")
"""Names of shards, of one data-parallel rank or common to all; see _get_ckpt_name in deepspeed/runtime/engine.py."""


# --- engines


def tag(number: int) -> str:
    """Return DeepSpeed's name of the checkpoint of an engine, which is the name of its folder."""
    return f"model{number}"


def is_read_by(data_parallel_rank: int, name: str) -> bool:
    """Return whether a rank with this data-parallel rank loads the file `name`, in a gang of the same size.

    False for the files of pipeline layers, whose readers are not known here.
    """
    shard = _SHARD.fullmatch(name)
    return name == ENGINES or bool(shard and shard["rank"] in (None, str(data_parallel_rank)))


def settings(engine: Any) -> dict[str, Any]:
    """Return the values in an engine's shards that the user sets, without tensors."""
    groups = getattr(engine.optimizer, "param_groups", [])
    return {
        "ds_config": engine.config,
        "lr_scheduler": engine.lr_scheduler and engine.lr_scheduler.state_dict(),
        "param_groups": [{name: value for name, value in group.items() if name != "params"} for group in groups],
    }


def expected(engine: Any) -> Iterator[Any]:
    """Yield the tensors that this rank will save of an engine, file by file, if they are known without a save.

    The files are those of `_save_checkpoint` and `_save_zero_checkpoint` in deepspeed/runtime/engine.py. State dicts
    are views of the engine: nothing is copied or exchanged. Layers of pipelines and mixtures of experts are left out,
    since their files are divided among ranks, and so are states that are offloaded to a disk.
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
    """Write engines.json, on rank 0."""
    if context.distributed.is_chief:
        write_json(folder / ENGINES, [engine_facts(engine) for engine in context.models])


def load_engines(context: DeepSpeedTrialContext, folder: Path, *, weights_alone: bool = False) -> None:
    """Load the saved state of every engine, or its weights alone. The engines must be new. Collective.

    Raises UsageError if DeepSpeed cannot load the saved state into these engines, HpcDetError for damaged shards.
    """
    saved = facts(folder)
    if len(saved) != len(context.models):
        raise UsageError(f"{folder}: contains {len(saved)} engines, but the trial wraps {len(context.models)}")
    aside = context.folder.checkpoints if context.folder else folder.parent
    for number, (engine, its_facts) in enumerate(zip(context.models, saved, strict=True)):
        shards = folder / tag(number)
        load_engine(engine, shards, its_facts, context.distributed, aside=aside, weights_alone=weights_alone)


def facts(folder: Path) -> list[dict[str, Any]]:
    """Return the facts about each engine from engines.json. Raises HpcDetError if the checkpoint has none."""
    found: list[dict[str, Any]] | None = read_json(folder / ENGINES)
    if found is None:
        raise HpcDetError(f"{folder}: has no {ENGINES}, so it is not a checkpoint of a DeepSpeedTrial; use one that is")
    return found


# --- ranks


def rank_state(context: DeepSpeedTrialContext, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
    """Return the content of this rank's rank-R.pth."""
    return {
        "rng": rng_state(),
        "callbacks": callbacks.state(),
        **open_state(context, window),
        **modes(context.models),
        "buffers": _buffers(context),
    }


def stored_rank(folder: Path, context: DeepSpeedTrialContext) -> dict[str, Any]:
    """Return this rank's state, or rank 0's if the former gang did not have this rank."""
    files = RankFiles(folder)
    own = files.find(rank_file(context.distributed.rank))
    state: dict[str, Any] = own.load() if own else files.load(rank_file(0))
    return state


def restore_rank(
    folder: Path, ranks: int, context: DeepSpeedTrialContext, window: MetricWindow
) -> dict[str, Any] | None:
    """Restore this rank except callbacks, and return the state of its random generators.

    Returns None if the gang of `ranks` ranks did not have this rank.

    In a gang of another size, the first reporting rank takes all open reports; other ranks have empty ones, except
    reducers.
    """
    gang = context.distributed
    own = stored_rank(folder, context)
    if ranks == gang.size or not context.use_pipeline_parallel:  # otherwise the file may be of another stage
        set_modes(context.models, own)
    if gang.rank < ranks:
        context.tensorboard.cut(own.get("tensorboard", {}))  # which older checkpoints do not have
    if ranks == gang.size:
        restore_open(context, window, own)
        _set_buffers(context, own["buffers"])
    elif gang.rank == reporting_ranks(gang.gather_json(context.mpu.should_report_metrics))[0]:
        files = RankFiles(folder)
        states = [files.load(rank_file(rank)) for rank in range(ranks)]
        restore_open(context, window, *states)
    generators: dict[str, Any] = own["rng"]
    return generators if gang.rank < ranks else None


def _buffers(context: DeepSpeedTrialContext) -> dict[str, torch.Tensor]:
    """Return the buffers of a state_dict; DeepSpeed saves those of the first data-parallel rank."""
    return {
        f"{k}.{path}.{name}": buffer
        for k, engine in enumerate(context.models)
        for path, module in engine.module.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in getattr(module, "_non_persistent_buffers_set", ())
    }


def _set_buffers(context: DeepSpeedTrialContext, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in _buffers(context).items():
            buffer.copy_(buffers[name])
