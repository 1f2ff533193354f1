"""The parameters of models: frozen ones, sharded ones, and those whose gradients ranks do not exchange.

torch's fully_shard (FSDP2) spreads a model over the ranks: each parameter is a DTensor, of which every rank has a part,
and is whole only while its layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hpc_det.core.sharded_tensors import is_sharded_tensor
from hpc_det.errors import UsageError, count

_SHOWN = 3


# --- frozen, or in eval mode


def modes(models: Sequence[torch.nn.Module]) -> dict[str, list[str]]:
    """Return the names of the frozen parameters and of the modules in eval mode."""
    return {
        "frozen": [name for name, parameter in named_parameters(models) if not parameter.requires_grad],
        "evaluating": [name for name, module in _modules(models) if not module.training],
    }


def set_modes(models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> None:
    """Restore the `modes` of `state`; everything else is trained."""
    frozen, evaluating = {*state["frozen"]}, {*state["evaluating"]}
    for name, parameter in named_parameters(models):
        parameter.requires_grad_(name not in frozen)
    for name, module in _modules(models):
        module.training = name not in evaluating


def _modules(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [(f"{k}.{name}", module) for k, model in enumerate(models) for name, module in model.named_modules()]


def named_parameters(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return all parameters by name: the number of the model, a dot, and the name in the model."""
    return [
        (f"{k}.{name}", parameter) for k, model in enumerate(models) for name, parameter in model.named_parameters()
    ]


def shown_names(names: Sequence[str]) -> str:
    """Return the first few names."""
    return ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])


# --- sharded


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether torch's fully_shard was applied to the model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(models: Iterable[torch.nn.Module]) -> None:
    """Release the whole parameters of the outermost modules, which remain after a forward pass without a
    backward pass.
    """
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def obstacles(model: torch.nn.Module, ranks: int, ddp_options: Sequence[str]) -> Iterator[str]:
    """Yield each reason why a gang of `ranks` ranks cannot train the model."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        yield "it is in FullyShardedDataParallel, whose parameters have no shapes; use fully_shard instead"
    if not is_sharded(model):
        return
    if ranks == 1:
        yield "it is sharded, but there is one rank; call fully_shard if context.distributed.get_size() > 1"
    elif sizes := {mesh for mesh in _mesh_sizes(model) if mesh != ranks}:
        yield (
            f"it is sharded over {', '.join(map(str, sorted(sizes)))} of the {count(ranks, 'rank')}, but each rank "
            "trains on other data; give fully_shard a mesh of all ranks"
        )
    for option in ddp_options:
        yield f"{option} is for DDP, which a sharded model is not put into; leave it out, and see fully_shard's own"
    if loose := [name for name, parameter in model.named_parameters() if _is_loose(parameter)]:
        yield (
            f"{len(loose)} of its parameters are trained and not sharded ({shown_names(loose)}), so that ranks do not "
            f"share their gradients; call fully_shard on the model itself, too, after its layers"
        )


def _mesh_sizes(model: torch.nn.Module) -> Iterator[int]:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.device_mesh.size()


def _is_loose(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and not isinstance(parameter, DTensor)


# --- not exchanged


class Unshared:
    """Parameters whose gradients ranks do not exchange, since their whole model was frozen when it was wrapped.

    DDP refuses such a model; thawed later, each rank would train a different model.
    """

    def __init__(self, wrapped_by: str) -> None:
        """`wrapped_by`: name of the method that wraps models, for messages."""
        self._wrapped_by = wrapped_by
        self._models: list[torch.nn.Module] = []
        self._parameters: list[torch.nn.Parameter] = []

    def add(self, model: torch.nn.Module) -> None:
        """Add a model outside DDP, in a gang of several ranks."""
        self._models.append(model)
        self._parameters += [parameter for _, parameter in _whole(model)]

    def watch(self, optimizer: object) -> None:
        """Check before each step of an optimizer of torch; others are ignored."""
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(lambda *_: self.check())

    def check(self) -> None:
        """Raise UsageError if one of the parameters has a gradient, which would be of this rank's batch only."""
        if not any(parameter.grad is not None for parameter in self._parameters):
            return
        for model in self._models:
            if names := [name for name, parameter in _whole(model) if parameter.grad is not None]:
                raise UsageError(
                    f"{len(names)} parameters of {type(model).__name__} ({shown_names(names)}) have gradients that "
                    f"ranks do not exchange: they were frozen at {self._wrapped_by}, with nothing else of the model "
                    f"in DDP, and thawed later; call {self._wrapped_by} first, and freeze the model after it"
                )


def _whole(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if not is_sharded_tensor(parameter)]
