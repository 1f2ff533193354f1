"""Load engines from shards: unchanged, or converted for another number of data-parallel ranks.

The conversion uses DeepSpeed's universal checkpoints, which contain each parameter and its optimizer state as a whole.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES
from deepspeed.pipe import TiedLayerSpec

from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch.deepspeed.checkpoint_engine import deepspeeds_own_allowed

Facts = dict[str, Any]
_STATES = {"exp_avg", "exp_avg_sq"}
"""Optimizer states that universal checkpoints contain (deepspeed/checkpoint/ds_to_universal.py)."""
_WEIGHTS_ONLY = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""Environment variables of torch.load, which refuses to have both set to 1."""
_WORDS = {
    "pipeline_stages": "a number of pipeline stages of",
    "model_parallel_size": "a model-parallel size of",
    "zero_stage": "ZeRO stage",
    "dtype": "dtype",
}


def engine_facts(engine: Any) -> Facts:
    """Return facts about an engine, for engines.json. From them `obstacles` finds what another engine cannot load."""
    stages = getattr(engine, "num_stages", 1)
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "data_parallel_size": engine.seq_dp_world_size,
        "pipeline_stages": stages,
        "model_parallel_size": engine.mp_world_size // stages,
        "dtype": "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32",
        "experts": bool(engine.has_moe_layers),
        "tied_layers": any(isinstance(spec, TiedLayerSpec) for spec in getattr(engine.module, "_layer_specs", ())),
        "optimizer_states": _optimizer_states(engine),
    }


def load_engine(
    engine: Any,
    shards: Path,
    saved: Facts,
    distributed: Distributed,
    *,
    aside: Path,
    weights_alone: bool = False,
) -> None:
    """Load the shards of a former engine into the new `engine`. Collective.

    `saved`: facts of the former engine. `aside`: a folder that all ranks see, for a conversion. The checkpoint is not
    changed. `weights_alone`: load the module, without optimizer, scheduler and counters.

    Raises UsageError, before anything is loaded, for what DeepSpeed cannot do; HpcDetError for damaged shards.
    """
    now = engine_facts(engine)
    if problems := obstacles(saved, now, weights_alone=weights_alone):
        raise UsageError([f"{shards}: {problem}; {_remedy(saved)}" for problem in problems])
    if not shards.is_dir():
        raise HpcDetError(f"{shards}: no such folder, so no shards of this engine; use another checkpoint")
    if not _needs_conversion(saved, now, weights_alone=weights_alone):
        _load_as_it_was(engine, shards, weights_alone=weights_alone)
        return
    with _universal(shards, aside, distributed) as universal:
        _load_universal(engine, shards, universal, saved, weights_alone=weights_alone)


def obstacles(saved: Facts, now: Facts, *, weights_alone: bool = False) -> list[str]:
    """Return a sentence for each difference that DeepSpeed cannot convert, with both values."""
    same = ["pipeline_stages", "model_parallel_size"]
    if not weights_alone or 3 in (saved["zero_stage"], now["zero_stage"]):
        same += ["zero_stage", "dtype"]
    problems = [
        f"saved with {_WORDS[name]} {saved[name]}, but this engine has {now[name]}"
        for name in same
        if saved[name] != now[name]
    ]
    if problems or not _needs_conversion(saved, now, weights_alone=weights_alone):
        return problems
    sizes = f"saved by {saved['data_parallel_size']} data-parallel ranks, and there are {now['data_parallel_size']} now"
    for name, what in (("experts", "mixtures of experts"), ("tied_layers", "pipelines with tied layers")):
        if saved[name] or now[name]:
            problems.append(f"{sizes}: DeepSpeed cannot redistribute {what}")
    states = set(saved["optimizer_states"]) - {"step"}
    if states != _STATES and not weights_alone:
        problems.append(
            f"{sizes}: DeepSpeed can redistribute only the states of Adam and AdamW ({', '.join(sorted(_STATES))}), "
            f"and this optimizer has {', '.join(sorted(states)) or 'none'}"
        )
    return problems


def _remedy(saved: Facts) -> str:
    slots = math.prod(saved[name] for name in ("data_parallel_size", "pipeline_stages", "model_parallel_size"))
    return f"resume on {slots} slot{'' if slots == 1 else 's'} with the settings that it was saved with"


def _needs_conversion(saved: Facts, now: Facts, *, weights_alone: bool) -> bool:
    """Return whether the shards must be converted for another number of data-parallel ranks.

    At stage 0 every rank has the whole state, and up to stage 2 all weights.
    """
    spread_from = 3 if weights_alone else 1
    return bool(now["zero_stage"] >= spread_from and saved["data_parallel_size"] != now["data_parallel_size"])


def _optimizer_states(engine: Any) -> list[str]:
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return sorted({name for state in optimizer.state.values() for name in state}) if optimizer else []


# --- as it was


def _load_as_it_was(engine: Any, shards: Path, *, weights_alone: bool) -> None:
    folder, tag = str(shards.parent), shards.name
    engine.load_checkpoint(folder, tag=tag, load_module_only=weights_alone)
    if weights_alone and engine.zero_optimization_stage() == 3:
        # At stage 3 load_module_only loads only buffers: the weights are in the optimizer's shards.
        engine.optimizer.checkpoint_event_prologue()
        engine._load_zero_checkpoint(folder, tag, load_optimizer_states=False)
        engine.optimizer.checkpoint_event_epilogue()


# --- through a universal checkpoint


@contextmanager
def _universal(shards: Path, aside: Path, distributed: Distributed) -> Iterator[Path]:
    """Yield the folder of the universal checkpoint, until the block ends. Rank 0 converts."""
    # If this process is killed, the next save deletes the folder, because of the prefix.
    hidden = aside / f".partial-universal-{shards.parent.name}"
    try:
        error = None
        if distributed.is_chief:
            error = _convert(shards, hidden / shards.name)
        distributed.wait_for_rank_0()
        if error := distributed.broadcast_json(error):
            raise HpcDetError(f"{shards}: cannot be converted for another number of data-parallel ranks: {error}")
        yield hidden / shards.name
        distributed.barrier()
    finally:
        if distributed.is_chief:
            shutil.rmtree(hidden, ignore_errors=True)


def _convert(shards: Path, universal: Path) -> str | None:
    """Convert the shards, and return the error or None.

    A separate process does it, without a GPU; all its memory is released when it exits.
    """
    print(f"hpc-det: {shards}: converting the shards for another number of data-parallel ranks", flush=True)
    shutil.rmtree(universal.parent, ignore_errors=True)
    universal.mkdir(parents=True, mode=0o700)
    alone = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    process = subprocess.run(
        [sys.executable, "-m", "hpc_det.pytorch.deepspeed.convert", str(shards), str(universal)],
        env={**os.environ, **alone, **_WEIGHTS_ONLY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if not process.returncode:
        return None
    return ([line for line in process.stderr.splitlines() if line.strip()] or [f"exit code {process.returncode}"])[-1]


def _load_universal(engine: Any, shards: Path, universal: Path, saved: Facts, *, weights_alone: bool) -> None:
    """Load the engine from a universal checkpoint, and load what DeepSpeed omits there.

    DeepSpeed omits buffers and frozen parameters and, at stage 3, the settings of all parameter groups but the first.
    """
    stage_3 = engine.zero_optimization_stage() == 3
    if stage_3:
        engine.optimizer.checkpoint_event_prologue()  # partitions all parameters: frozen ones are loaded in parts
    engine._curr_ckpt_path = str(shards)  # where a pipeline looks for its layers
    engine.load_module_state_dict(_module(engine, shards, saved["data_parallel_size"]))
    with _universal_allowed(engine):
        engine.load_checkpoint(str(universal.parent), tag=universal.name, load_module_only=weights_alone)
        if stage_3 and not weights_alone:
            _give_groups_their_own(engine.optimizer.optimizer, universal / "zero" / "optimizer_state.pt")


def _give_groups_their_own(optimizer: torch.optim.Optimizer, file: Path) -> None:
    """Restore the settings of each parameter group, and give each state its own `step` tensor.

    DeepSpeed loads the settings of the first group into all groups, and one shared tensor as the step of all states.
    """
    stored = torch.load(file, mmap=True)["param_groups"]
    for group, settings in zip(optimizer.param_groups, stored, strict=True):
        group.update({name: value for name, value in settings.items() if name != "params"})
    for state in optimizer.state.values():
        state["step"] = copy.deepcopy(state["step"])


@contextmanager
def _universal_allowed(engine: Any) -> Iterator[None]:
    """Let the engine read universal checkpoints within the block.

    Its optimizer unpickles the files with torch.load: the variables restrict it, as in convert.py.
    """
    engine._config.load_universal_checkpoint = True
    users = {name: os.environ.get(name) for name in _WEIGHTS_ONLY}
    os.environ.update(_WEIGHTS_ONLY)
    try:
        with deepspeeds_own_allowed():
            yield
    finally:
        for name, value in users.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        engine._config.load_universal_checkpoint = False


def _module(engine: Any, shards: Path, ranks: int) -> Any:
    """Return the state from which the module is loaded.

    At stage 3 it contains rank 0's buffers, and this rank's parts of frozen parameters.
    """
    state = _model_states(engine, shards, 0)
    if engine.zero_optimization_stage() == 3 and state[FROZEN_PARAM_FRAGMENTS]:
        others = [_model_states(engine, shards, rank) for rank in range(1, ranks)]
        parts = [one[FROZEN_PARAM_FRAGMENTS] for one in (state, *others)]
        group = engine.optimizer.dp_process_group
        state[FROZEN_PARAM_FRAGMENTS] = {
            name: _share(torch.cat([part[name] for part in parts])[: shape.numel()], group)
            for name, shape in state[FROZEN_PARAM_SHAPES].items()
        }
    return state


def _model_states(engine: Any, shards: Path, data_parallel_rank: int) -> Any:
    file = engine._get_ckpt_name(str(shards.parent), shards.name, pp_placeholder=str(data_parallel_rank))
    return engine.checkpoint_engine.load(file)


def _share(whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of a flat tensor. All parts have the same size; the last ones are padded with zeros.

    As in deepspeed/runtime/zero/partition_parameters.py.
    """
    size = math.ceil(len(whole) / dist.get_world_size(group))
    share = whole.new_zeros(size)
    there = whole[size * dist.get_rank(group) :][:size]
    share[: len(there)] = there
    return share
