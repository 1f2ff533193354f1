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
    if rebuilds and any(parameter.requires_grad for parameter in model.parameters()):
        _settle_buckets(wrapped)
    return wrapped


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """One backward pass in parameter order; at its next forward DDP takes the order of arrival from it, for good."""
    model = wrapped.module
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.forward = lambda: torch.stack([parameter.sum().float() for parameter in parameters]).sum()
    try:
        wrapped().backward()
    finally:
        del model.forward
    for parameter in parameters:
        parameter.grad = None
