"""DistributedDataParallel whose sums do not depend on when the process started.

DDP lays gradients into buckets by parameter order for its first iteration, and by order of arrival from then on. A
ring all-reduce adds an element's parts in an order that follows from its place in the bucket, so with three ranks and
more the first iteration after a resume would round differently from the same iteration of an undisturbed run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def data_parallel(model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> DistributedDataParallel:
    """`model` in DDP, with its final buckets from the first iteration on."""
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)
    rebuilds = not options.get("find_unused_parameters") and not options.get("static_graph")
    if rebuilds and _takes_plain_gradients(model):
        _settle_buckets(wrapped)
    return wrapped


def _takes_plain_gradients(model: torch.nn.Module) -> bool:
    """Not so for sparse embeddings, nor where hooks act on gradients, such as an optimizer in the backward pass."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooked = any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)
    return bool(parameters) and not hooked and not any(getattr(module, "sparse", False) for module in model.modules())


class _Sum(torch.nn.Module):
    """Stands in for the model, so that no hook of it runs and nothing of it is touched."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self._summed = parameters

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum().float() for parameter in self._summed]).sum()


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """One backward pass in parameter order; at its next forward DDP takes the order of arrival from it, for good."""
    model, broadcasts_buffers = wrapped.module, wrapped.broadcast_buffers
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped.module, wrapped.broadcast_buffers = _Sum(parameters), False
    try:
        wrapped().backward()
    finally:
        wrapped.module, wrapped.broadcast_buffers = model, broadcasts_buffers
    for parameter in parameters:
        parameter.grad = None
