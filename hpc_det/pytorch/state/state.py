"""What a checkpoint of a PyTorchTrial holds, and how it comes back.

state_dict.pth    models_state_dict, optimizers_state_dict, lr_schedulers_state_dict, callbacks    rank 0
                  and scaler_state_dict where losses are scaled
shard-R.pth       of sharded models: see hpc_det.pytorch.state.sharded_tensors                     each rank
progress.pth      batches, position, validation state, number of ranks                             rank 0
rank-R.pth        random generators, gradients that wait for an optimizer step, the open windows   each rank
                  of metrics and reducers, the lengths of event files, what is frozen or in eval
                  mode, buffers that ranks do not share at this batch, what is known of the best
                  size of DDP's buckets
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from hpc_det.checkpoint.content import load, read
from hpc_det.checkpoint.reading import is_in_memory
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.distributed.rng import rng_state
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch.data import Position
from hpc_det.pytorch.loop.schedule import Progress
from hpc_det.pytorch.state.sharded_tensors import StoredShards, likes_of, part_like
from hpc_det.pytorch.strategies.ddp import DataParallel, shares_buffers
from hpc_det.pytorch.strategies.parameters import modes, named_parameters, set_modes
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial_context import TrialContext, parameters_of

STATE_DICT = "state_dict.pth"
PROGRESS = "progress.pth"
MODELS = "models_state_dict"
GRADIENTS = "gradients"


def rank_file(rank: int) -> str:
    return f"rank-{rank}.pth"


# --- files


PLACES = (STATE_DICT, f"determined/{STATE_DICT}", f"pedl/{STATE_DICT}", "checkpoint.pt")
"""Where the state is, ours and Determined's through the years."""
_DDP_PREFIX = "module."


def stored_state(folder: Path, models: Sequence[torch.nn.Module] = (), **options: Any) -> dict[str, Any]:
    """The content of a checkpoint's state_dict.pth, at any of its places, with the four keys of the API guide.

    It is read without unpickling anything but tensors, numbers, texts and plain containers.

    Fitted to `models`: Determined stored those of several slots with DDP's "module." before each name.

    `options` are torch.load's `map_location` and `mmap`. Without the second, the file is mapped where it is in memory
    anyway, as after CheckpointContext.newest: all ranks of a node share that. So keep copies of tensors alone.

    Raises UsageError where there is no such file, HpcDetError for one that is damaged, holds objects, or is none.
    """
    file = state_file(folder)
    state = read(file, **{"mmap": is_zipfile(file) and is_in_memory(file), **options})
    if not isinstance(state, dict) or MODELS not in state:
        raise HpcDetError(f"{file}: has no {MODELS}, so it is not the state of a PyTorchTrial")
    stored = state[MODELS]
    fitted = [_without_prefix(content, model) for content, model in zip(stored, models, strict=False)]
    return {
        "optimizers_state_dict": [],
        "lr_schedulers_state_dict": [],
        "callbacks": {},
        **state,
        MODELS: [*fitted, *stored[len(fitted) :]],
    }


def state_file(folder: Path) -> Path:
    found = next((folder / place for place in PLACES if (folder / place).is_file()), None)
    if found is None:
        raise UsageError(f"{folder}: none of {', '.join(PLACES)} is there; name the folder of a checkpoint")
    return found


def _without_prefix(content: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """A model may have a child called `module` itself."""
    if content.keys() != model.state_dict().keys() and all(name.startswith(_DDP_PREFIX) for name in content):
        consume_prefix_in_state_dict_if_present(content, _DDP_PREFIX)
    return content


# --- models


def model_state(context: PyTorchTrialContext, callbacks: Callbacks) -> dict[str, Any]:
    """The four keys that the PyTorch API guide promises, and Determined's fifth."""
    scaler = context.precision.scaler
    return {
        **trained_state(context),
        "callbacks": callbacks.state(),
        **({"scaler_state_dict": scaler.state_dict()} if scaler else {}),
    }


def trained_state(context: PyTorchTrialContext) -> dict[str, Any]:
    """The first three of them; and gradients that wait for an optimizer step, where these are sharded."""
    state: dict[str, Any] = {key: [owner.state_dict() for owner in owners] for key, owners in _owners(context).items()}
    gradients = {name: gradient for name, gradient in _every_gradient(context).items() if isinstance(gradient, DTensor)}
    return {**state, **({GRADIENTS: gradients} if gradients else {})}


def restore_models(state: dict[str, Any], context: PyTorchTrialContext, where: Path) -> None:
    """Raises HpcDetError where the trial no longer wraps as many objects as it did."""
    problems = [
        f"{where / STATE_DICT}: {key} holds {len(state[key])}, the trial wraps {len(owners)}"
        for key, owners in _owners(context).items()
        if len(state[key]) != len(owners)
    ]
    if problems:
        raise HpcDetError(problems)
    shards = StoredShards(where, context.distributed.rank)
    for key, owners in _owners(context).items():
        for k, owner in enumerate(owners):
            _restore(owner, shards.fitted(state[key][k], f"{key}/{k}", likes_of(owner, f"{key}/{k}")))
    parameters = dict(named_parameters(context.models))
    likes = {f"{GRADIENTS}/{name}": parameter for name, parameter in parameters.items()}
    for name, gradient in shards.fitted(state.get(GRADIENTS, {}), GRADIENTS, likes).items():
        parameters[name].grad = gradient.to(parameters[name].device)
    if context.precision.scaler and "scaler_state_dict" in state:
        _restore(context.precision.scaler, state["scaler_state_dict"])


def _restore(owner: Any, content: dict[str, Any]) -> None:
    """Nothing of `content` is kept but copies: it may lie in a mapped file, which may be deleted."""
    if isinstance(owner, torch.nn.Module):
        _load_model(owner, content)
    elif isinstance(owner, torch.optim.Optimizer):
        owner.load_state_dict(content)  # moves it to the GPU; on the CPU it takes the very tensors
        for state in owner.state.values():
            state.update({name: copy.deepcopy(value) for name, value in state.items() if not _is_on_gpu(value)})
        keep_types(owner, content.get("state", {}))
    else:
        owner.load_state_dict(copy.deepcopy(content))


def _load_model(model: torch.nn.Module, content: dict[str, Any]) -> None:
    """Into the memory of its parameters and buffers. What modules keep besides, as an extra state, is copied first."""
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    loaded = {name for name, _ in named}
    kept = {name: copy.deepcopy(value) for name, value in content.items() if name not in loaded}
    own = copy.copy(content)  # with the versions of modules, which a new map would lack
    own.update(kept)
    model.load_state_dict(own)


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def restore_weights(state: dict[str, Any], context: PyTorchTrialContext, where: Path) -> None:
    """Of the models alone. Raises UsageError where they are others than the trial's."""
    stored, models, shards = state[MODELS], context.models, StoredShards(where, context.distributed.rank)
    if len(stored) != len(models):
        raise UsageError(f"{where / STATE_DICT}: holds {len(stored)} models, the trial wraps {len(models)}")
    for k, (model, content) in enumerate(zip(models, stored, strict=True)):
        try:
            _load_model(model, shards.fitted(content, f"{MODELS}/{k}", likes_of(model, f"{MODELS}/{k}")))
        except RuntimeError as error:
            raise UsageError(f"{where / STATE_DICT}: other weights than the trial's: {error}") from None


def _owners(context: PyTorchTrialContext) -> dict[str, list[Any]]:
    return {
        MODELS: [*context.models],
        "optimizers_state_dict": [*context.optimizers],
        "lr_schedulers_state_dict": [*context.lr_schedulers],
    }


def keep_types(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """load_state_dict casts most of the state to the types of the parameters."""
    for number, parameter in enumerate(parameters_of(optimizer)):
        for name, value in saved.get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)


# --- progress


def progress_state(progress: Progress, ranks: int) -> dict[str, Any]:
    return {**asdict(progress), "ranks": ranks}


def restored_progress(folder: Path) -> tuple[Progress, int]:
    """And the number of ranks that the gang had."""
    state = load(folder / PROGRESS)
    ranks = state.pop("ranks")
    return Progress(**{**state, "position": Position(**state["position"])}), ranks


# --- what is open between two reports, of any kind of trial


def open_state(context: TrialContext, window: MetricWindow) -> dict[str, Any]:
    return {
        "window": window.state(),
        "reducers": context.reducers.state(),
        "stop_requested": context.get_stop_requested(),
        "tensorboard": context.tensorboard.position(),
    }


def restore_open(context: TrialContext, window: MetricWindow, *states: Mapping[str, Any]) -> None:
    """As this rank left it; or what several ranks of a gang of another size did, all of it."""
    window.restore(*(state["window"] for state in states))
    context.reducers.restore(*(state["reducers"] for state in states))
    context.set_stop_requested(any(state["stop_requested"] for state in states))


# --- ranks


def rank_state(context: PyTorchTrialContext, window: MetricWindow) -> dict[str, Any]:
    return {
        "rng": rng_state(),
        **open_state(context, window),
        "fusion": context.fusion.state() if context.fusion else None,
        "gradients": _gradients(context),
        "buffers": _own_buffers(context),
        "sends_buffers": [model.require_forward_param_sync for model in _in_ddp(context)],
        **modes(context.models),
    }


def restore_rank(folder: Path, ranks: int, context: PyTorchTrialContext, window: MetricWindow) -> dict[str, Any] | None:
    """Everything of this rank but its generators, whose state is returned; None if it was not in the gang of `ranks`.

    A gang of another size goes on with the same sums: rank 0 takes over all open windows, and every rank the mean of
    the gradients, as DDP would have made it.
    """
    rank, size = context.distributed.rank, context.distributed.size
    own = load(folder / rank_file(rank if rank < ranks else 0))
    set_modes(context.models, own)
    if rank < ranks:
        context.tensorboard.cut(own.get("tensorboard", {}))  # older checkpoints have neither this nor "fusion"
    if ranks == size:
        restore_open(context, window, own)
        if (tuned := own.get("fusion")) and context.fusion:
            context.fusion.restore(tuned)  # first of all, since it makes new buckets
        _set_gradients(context, own["gradients"])
        _set_own_buffers(context, own["buffers"])
        for model, sends in zip(_in_ddp(context), own["sends_buffers"], strict=True):
            model.require_forward_param_sync = sends
    else:
        _take_over(folder, ranks, context, window)
    generators: dict[str, Any] = own["rng"]
    return generators if rank < ranks else None


def _take_over(folder: Path, ranks: int, context: PyTorchTrialContext, window: MetricWindow) -> None:
    states = []
    gradients: dict[str, torch.Tensor] = {}
    for rank in range(ranks):  # one file after the other: they may hold as much as a model
        state = load(folder / rank_file(rank))
        states.append({name: state[name] for name in ("window", "reducers", "stop_requested")})
        for name, gradient in state["gradients"].items():  # a rank without one counts as zero
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    if context.distributed.is_chief:
        restore_open(context, window, *states)
    _set_gradients(context, {name: total / ranks for name, total in gradients.items()})


def _gradients(context: PyTorchTrialContext) -> dict[str, torch.Tensor]:
    """This rank's own: those of sharded models are shared out already, see `trained_state`."""
    return {name: gradient for name, gradient in _every_gradient(context).items() if not isinstance(gradient, DTensor)}


def _every_gradient(context: PyTorchTrialContext) -> dict[str, torch.Tensor]:
    """Those that are there: none right after an optimizer step that zeroes them."""
    return {name: parameter.grad for name, parameter in named_parameters(context.models) if parameter.grad is not None}


def _set_gradients(context: PyTorchTrialContext, gradients: dict[str, torch.Tensor]) -> None:
    """They wait for an optimizer step."""
    exchanges = {id(parameter): model for model in _in_ddp(context) for parameter in model.parameters()}
    for name, parameter in named_parameters(context.models):
        if name not in gradients:
            continue
        gradient = part_like(gradients[name], parameter)
        if model := exchanges.get(id(parameter)):
            model.put_gradient(parameter, gradient)
        else:
            parameter.grad = gradient


def takes_buffers(context: PyTorchTrialContext, wrapped: torch.nn.Module) -> bool:
    """Whether each rank has rank 0's at the next batch, whatever it has now.

    Between optimizer steps DDP sends none.
    """
    return context.distributed.size == 1 or (context.aggregation_frequency == 1 and shares_buffers(wrapped))


def _own_buffers(context: PyTorchTrialContext) -> dict[str, torch.Tensor]:
    """What a state_dict holds of them, where each rank has its own: state_dict.pth has rank 0's only."""
    return {
        f"{k}.{name}": value
        for k, (model, wrapped) in enumerate(zip(context.models, context.wrapped_models, strict=True))
        if not takes_buffers(context, wrapped)
        for name, value in _stored_buffers(model)
    }


def _stored_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    names = {name for name, _ in model.named_buffers()}
    return [(name, value) for name, value in model.state_dict().items() if name in names]


def _set_own_buffers(context: PyTorchTrialContext, buffers: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in _own_buffers(context).items():
            buffer.copy_(buffers[name])


def _in_ddp(context: PyTorchTrialContext) -> list[DataParallel]:
    return [model for model in context.wrapped_models if isinstance(model, DataParallel)]
