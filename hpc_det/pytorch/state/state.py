"""The content of a PyTorchTrial's checkpoint, saved and restored.

state_dict.pth    models_state_dict, optimizers_state_dict, lr_schedulers_state_dict, callbacks    rank 0
                  and, with scaled losses, scaler_state_dict
shard-R.pth       parts of sharded models: see hpc_det.core.sharded_tensors                        each rank
progress.pth      batches, position, validation state, number of ranks                             rank 0
rank-R.pth        random generators, gradients before their optimizer step, metrics and reducers   each rank
                  since the last report, lengths of event files, frozen and eval modes, buffers
                  that ranks do not share at this batch, measurements of DDP's bucket size
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from torch.distributed.tensor import DTensor
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from hpc_det.checkpoint.content import read
from hpc_det.checkpoint.node_folders import rank_file
from hpc_det.checkpoint.rank_files import RankFiles
from hpc_det.checkpoint.reading import is_in_memory
from hpc_det.core.sharded_tensors import StoredShards, likes_of, part_like
from hpc_det.core.state_dicts import load_model, restore
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.distributed.rng import rng_state
from hpc_det.errors import HpcDetError, UsageError
from hpc_det.pytorch.strategies.ddp import DataParallel, shares_buffers
from hpc_det.pytorch.strategies.parameters import modes, named_parameters, set_modes
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial_context import TrialContext

STATE_DICT = "state_dict.pth"
MODELS = "models_state_dict"
GRADIENTS = "gradients"


# --- files


PLACES = (STATE_DICT, f"determined/{STATE_DICT}", f"pedl/{STATE_DICT}", "checkpoint.pt")
"""Places of the state in a checkpoint, by hpc_det and by Determined's versions."""
_DDP_PREFIX = "module."


def stored_state(folder: Path, models: Sequence[torch.nn.Module] = (), **options: Any) -> dict[str, Any]:
    """Return the content of a checkpoint's state_dict.pth, at any of its places, with the four keys of the API guide.

    It unpickles only tensors, numbers, texts and plain containers. `models`: DDP's "module." is removed from the names
    in their states; Determined stored it for models of several slots. `options` are torch.load's `map_location` and
    `mmap`. Without `mmap`, the file is mapped if it is in memory anyway, as after CheckpointContext.newest, so that all
    ranks of a node share it; keep only copies of its tensors.

    Raises UsageError if there is no such file, HpcDetError for a damaged one, one with other objects, and another kind
    of file.
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
    """Return the path of a checkpoint's state. Raises UsageError if there is none at any of PLACES."""
    found = next((folder / place for place in PLACES if (folder / place).is_file()), None)
    if found is None:
        raise UsageError(f"{folder}: contains none of {', '.join(PLACES)}; name the folder of a checkpoint")
    return found


def _without_prefix(content: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """Return the state without DDP's prefix. A model may itself have a child called `module`."""
    if content.keys() != model.state_dict().keys() and all(name.startswith(_DDP_PREFIX) for name in content):
        consume_prefix_in_state_dict_if_present(content, _DDP_PREFIX)
    return content


# --- models


def model_state(context: PyTorchTrialContext, callbacks: Callbacks) -> dict[str, Any]:
    """Return the content of state_dict.pth: the four keys of the PyTorch API guide, and scaler_state_dict, if any."""
    scaler = context.precision.scaler
    return {
        **trained_state(context),
        "callbacks": callbacks.state(),
        **({"scaler_state_dict": scaler.state_dict()} if scaler else {}),
    }


def trained_state(context: PyTorchTrialContext) -> dict[str, Any]:
    """Return the states of models, optimizers and schedulers, and sharded gradients before their optimizer step."""
    state: dict[str, Any] = {key: [owner.state_dict() for owner in owners] for key, owners in _owners(context).items()}
    gradients = {name: gradient for name, gradient in _every_gradient(context).items() if isinstance(gradient, DTensor)}
    return {**state, **({GRADIENTS: gradients} if gradients else {})}


def restore_models(state: dict[str, Any], context: PyTorchTrialContext, where: Path) -> None:
    """Restore the state. Raises HpcDetError if the trial wraps another number of objects than was saved."""
    problems = [
        f"{where / STATE_DICT}: {key} contains {len(state[key])}, but the trial wraps {len(owners)}"
        for key, owners in _owners(context).items()
        if len(state[key]) != len(owners)
    ]
    if problems:
        raise HpcDetError(problems)
    shards = StoredShards(where, context.distributed.rank)
    for key, owners in _owners(context).items():
        for k, owner in enumerate(owners):
            restore(owner, shards.fitted(state[key][k], f"{key}/{k}", likes_of(owner, f"{key}/{k}")))
    parameters = dict(named_parameters(context.models))
    likes = {f"{GRADIENTS}/{name}": parameter for name, parameter in parameters.items()}
    for name, gradient in shards.fitted(state.get(GRADIENTS, {}), GRADIENTS, likes).items():
        parameters[name].grad = gradient.to(parameters[name].device)
    if context.precision.scaler and "scaler_state_dict" in state:
        restore(context.precision.scaler, state["scaler_state_dict"])


def restore_weights(state: dict[str, Any], context: PyTorchTrialContext, where: Path) -> None:
    """Restore the weights of the models alone. Raises UsageError if they do not fit the trial's models."""
    stored, models, shards = state[MODELS], context.models, StoredShards(where, context.distributed.rank)
    if len(stored) != len(models):
        raise UsageError(f"{where / STATE_DICT}: contains {len(stored)} models, but the trial wraps {len(models)}")
    for k, (model, content) in enumerate(zip(models, stored, strict=True)):
        try:
            load_model(model, shards.fitted(content, f"{MODELS}/{k}", likes_of(model, f"{MODELS}/{k}")))
        except RuntimeError as error:
            raise UsageError(f"{where / STATE_DICT}: the weights do not fit the trial's model: {error}") from None


def _owners(context: PyTorchTrialContext) -> dict[str, list[Any]]:
    return {
        MODELS: [*context.models],
        "optimizers_state_dict": [*context.optimizers],
        "lr_schedulers_state_dict": [*context.lr_schedulers],
    }


# --- what is open between two reports, of any kind of trial


def open_state(context: TrialContext, window: MetricWindow) -> dict[str, Any]:
    """Return this rank's metrics, reducers and stop request since the last report, and the lengths of event files."""
    return {
        "window": window.state(),
        "reducers": context.reducers.state(),
        "stop_requested": context.get_stop_requested(),
        "tensorboard": context.tensorboard.position(),
    }


def restore_open(context: TrialContext, window: MetricWindow, *states: Mapping[str, Any]) -> None:
    """Restore the open reports of this rank, or of several ranks of a gang of another size."""
    window.restore(*(state["window"] for state in states))
    context.reducers.restore(*(state["reducers"] for state in states))
    context.set_stop_requested(any(state["stop_requested"] for state in states))


# --- ranks


def rank_state(context: PyTorchTrialContext, window: MetricWindow) -> dict[str, Any]:
    """Return the content of this rank's rank-R.pth."""
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
    """Restore this rank, and return the state of its random generators; None if the gang of `ranks` did not have it.

    In a gang of another size, rank 0 takes the open reports of all ranks, and every rank takes the mean of the
    gradients, as DDP would have computed it.
    """
    rank, size = context.distributed.rank, context.distributed.size
    own = RankFiles(folder).load(rank_file(rank if rank < ranks else 0))
    set_modes(context.models, own)
    if rank < ranks:
        context.tensorboard.cut(own.get("tensorboard", {}))  # older checkpoints have neither this nor "fusion"
    if ranks == size:
        restore_open(context, window, own)
        if (tuned := own.get("fusion")) and context.fusion:
            context.fusion.restore(tuned)  # before gradients and buffers, since it makes new buckets
        _set_gradients(context, own["gradients"])
        _set_own_buffers(context, own["buffers"])
        for model, sends in zip(_in_ddp(context), own["sends_buffers"], strict=True):
            model.require_forward_param_sync = sends
    else:
        _take_over(folder, ranks, context, window)
    generators: dict[str, Any] = own["rng"]
    return generators if rank < ranks else None


def _take_over(folder: Path, ranks: int, context: PyTorchTrialContext, window: MetricWindow) -> None:
    states, files = [], RankFiles(folder)
    gradients: dict[str, torch.Tensor] = {}
    for rank in range(ranks):  # one file at a time, since each may be as large as a model
        state = files.load(rank_file(rank))
        states.append({name: state[name] for name in ("window", "reducers", "stop_requested")})
        for name, gradient in state["gradients"].items():  # a rank without one counts as zero
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    if context.distributed.is_chief:
        restore_open(context, window, *states)
    _set_gradients(context, {name: total / ranks for name, total in gradients.items()})


def _gradients(context: PyTorchTrialContext) -> dict[str, torch.Tensor]:
    """Return this rank's gradients; `trained_state` has those of sharded models."""
    return {name: gradient for name, gradient in _every_gradient(context).items() if not isinstance(gradient, DTensor)}


def _every_gradient(context: PyTorchTrialContext) -> dict[str, torch.Tensor]:
    """Return the existing gradients: none right after an optimizer step that clears them."""
    return {name: parameter.grad for name, parameter in named_parameters(context.models) if parameter.grad is not None}


def _set_gradients(context: PyTorchTrialContext, gradients: dict[str, torch.Tensor]) -> None:
    """Set gradients that wait for an optimizer step."""
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
    """Return whether each rank takes rank 0's buffers at the next batch. Between optimizer steps, DDP sends none."""
    return context.distributed.size == 1 or (context.aggregation_frequency == 1 and shares_buffers(wrapped))


def _own_buffers(context: PyTorchTrialContext) -> dict[str, torch.Tensor]:
    """Return the buffers that differ between ranks, as a state_dict names them; state_dict.pth contains
    only rank 0's.
    """
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
