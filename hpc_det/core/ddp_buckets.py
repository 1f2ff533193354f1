"""The buckets of DistributedDataParallel, settled before the first iteration, so that a resumed run rounds as before.

DDP assigns gradients to buckets in parameter order in its first iteration, and in order of arrival afterwards. A ring
all-reduce adds the parts of an element in an order that depends on its place in the bucket. So with three or more
ranks, the first iteration after a resume would round differently from the same iteration of an uninterrupted run.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.parallel import DistributedDataParallel

_HOOKS: tuple[str, ...] = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of a parameter with its hooks on gradients."""


def settle_buckets_in(model: object) -> None:
    """Settle the buckets of each DistributedDataParallel in a model, such as in Fabric's; do nothing for other objects.

    Collective.
    """
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            settle_buckets(module)


def settle_buckets(wrapped: DistributedDataParallel) -> None:
    """Give DDP its final buckets by one backward pass in parameter order. Collective; call it before the first batch.

    It clears all gradients. It does nothing for a model whose buckets DDP never changes (find_unused_parameters,
    static_graph) or which cannot take this pass: sparse gradients, hooks on gradients such as a fused optimizer, and
    communication hooks. With a torch whose DDP has other internals, it prints what that costs.
    """
    if wrapped.find_unused_parameters or wrapped.static_graph:
        return
    if missing := _missing(wrapped):
        _report(missing)
    elif not wrapped._comm_hooks and _takes_plain_gradients(wrapped.module):
        _settle(wrapped)


def _missing(wrapped: DistributedDataParallel) -> str:
    """Return the name of what this module needs of DDP and this torch does not have, or ""."""
    if not hasattr(wrapped, "_comm_hooks"):
        return "_comm_hooks"
    if hook := next((hook for hook in _HOOKS if not hasattr(torch.Tensor, hook)), None):
        return f"parameters with {hook}"
    return "" if hasattr(getattr(wrapped, "reducer", None), "_rebuild_buckets") else "reducer._rebuild_buckets"


@cache
def _report(missing: str) -> None:
    print(
        f"hpc-det: DistributedDataParallel of torch {torch.__version__} has no {missing}, with which this version of "
        f"hpc_det settles its buckets: on three or more ranks, the first batch after a resume may round differently",
        flush=True,
    )


def _takes_plain_gradients(model: torch.nn.Module) -> bool:
    """Return whether buckets can be fixed: not with sparse embeddings, or with hooks on gradients such as a fused
    optimizer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooked = any(getattr(parameter, hook) for parameter in parameters for hook in _HOOKS)
    return bool(parameters) and not hooked and not any(getattr(module, "sparse", False) for module in model.modules())


class _Sum(torch.nn.Module):
    """A stand-in model for one backward pass, so that no hook of the real model runs."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__()
        self._summed = parameters

    def forward(self, on_its_device: torch.Tensor) -> torch.Tensor:
        """Return the sum of all parameters. DDP on a GPU needs an input (IndexError in its _pre_forward), which is not
        used.
        """
        return torch.stack([parameter.sum().real.float() for parameter in self._summed]).sum()


def _settle(wrapped: DistributedDataParallel) -> None:
    # It runs here and not before the next forward pass, since it clears all gradients, and a resume restores some in
    # between.
    model, broadcasts_buffers = wrapped.module, wrapped.broadcast_buffers
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapped.module, wrapped.broadcast_buffers = _Sum(parameters), False
    try:
        wrapped(torch.zeros((), device=parameters[0].device)).backward()
    finally:
        wrapped.module, wrapped.broadcast_buffers = model, broadcasts_buffers
    for parameter in parameters:
        parameter.grad = None
    wrapped.reducer._rebuild_buckets()
