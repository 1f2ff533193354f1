"""Restoring models, optimizers and other objects from the state dicts of a checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch


def restore(owner: Any, content: dict[str, Any]) -> None:
    """Restore an object from copies of `content`, which may be in a mapped file that is deleted later."""
    if isinstance(owner, torch.nn.Module):
        load_model(owner, content)
    elif isinstance(owner, torch.optim.Optimizer):
        owner.load_state_dict(content)  # copies tensors to the GPU; on the CPU it keeps those of `content`
        for state in owner.state.values():
            state.update({name: copy.deepcopy(value) for name, value in state.items() if not _is_on_gpu(value)})
        keep_types(owner, content.get("state", {}))
    else:
        owner.load_state_dict(copy.deepcopy(content))


def load_model(model: torch.nn.Module, content: dict[str, Any]) -> None:
    """Copy the state into the parameters and buffers. Extra state, which modules keep as it is, is copied first."""
    named = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
    loaded = {name for name, _ in named}
    kept = {name: copy.deepcopy(value) for name, value in content.items() if name not in loaded}
    own = copy.copy(content)  # keeps `_metadata`, the versions of the modules, which a new dict would lack
    own.update(kept)
    model.load_state_dict(own)


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def keep_types(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Restore the types of the state, most of which load_state_dict casts to the types of the parameters."""
    for number, parameter in enumerate(parameters_of(optimizer)):
        for name, value in saved.get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
