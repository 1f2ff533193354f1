"""Models that torch's fully_shard (FSDP2) has spread over the ranks: each parameter is a DTensor, of which every rank
has a part, and is whole only while its layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from hpc_det.pytorch.strategies.modes import shown_names


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(models: Iterable[torch.nn.Module]) -> None:
    """After a forward pass without a backward pass the parameters of the outermost module are still whole ones."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def obstacles(model: torch.nn.Module, ranks: int, ddp_options: Sequence[str]) -> Iterator[str]:
    """What keeps a model, sharded or not, from being trained by a gang of so many `ranks`, a sentence each."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        yield "it is in FullyShardedDataParallel, whose parameters have lost their shapes; use fully_shard instead"
    if not is_sharded(model):
        return
    if ranks == 1:
        yield "it is sharded, and there is one rank; call fully_shard where context.distributed.get_size() > 1"
    elif sizes := {mesh for mesh in _mesh_sizes(model) if mesh != ranks}:
        yield (
            f"it is sharded over {', '.join(map(str, sorted(sizes)))} of the {ranks} ranks, which each train on data "
            f"of their own; give fully_shard a mesh of all of them"
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
