"""The state of models and optimizers as short texts by name, for the comparison of two trainings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hpc_det.core.fingerprint import Texts, tensor_text, texts_of
from hpc_det.core.state_dicts import parameters_of
from hpc_det.distributed.rng import rng_state


def generators_texts() -> Texts:
    """Return the global random generators of this rank."""
    return texts_of("generators", rng_state())


def weights_texts(path: str, model: torch.nn.Module, skipped: frozenset[int] = frozenset()) -> Texts:
    """Return the weights, and buffers that are in no state_dict, by names after `path`.

    `skipped`: the ids of buffers that are left out.
    """
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in skipped]
    return {f"{path}: {name}": tensor_text(tensor) for name, tensor in [*model.named_parameters(), *buffers]}


def gradients_texts(path: str, model: torch.nn.Module) -> Texts:
    """Return the gradients before their step, by names after `path`."""
    waiting = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    return {f"gradient of {path}: {name}": tensor_text(gradient) for name, gradient in waiting}


def names_of(models: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Return the names of parameters by their ids."""
    return {
        id(parameter): f"{number}.{name}" if number else name
        for number, model in enumerate(models)
        for name, parameter in model.named_parameters()
    }


def optimizer_state(optimizer: Any, names: dict[int, str]) -> Any:
    """Return the state of an optimizer; of one of torch, by the `names` of its parameters, see `names_of`."""
    content = optimizer.state_dict()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return content
    parameters = enumerate(parameters_of(optimizer))
    state = {names.get(id(each), str(number)): optimizer.state.get(each) for number, each in parameters}
    return {"state": state, "groups": content["param_groups"]}
