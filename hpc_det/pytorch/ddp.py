"""DistributedDataParallel whose sums do not depend on when the process started.

DDP lays gradients into buckets by parameter order for its first iteration, and by order of arrival from then on. A
ring all-reduce adds an element's parts in an order that follows from its place in the bucket, so with three ranks and
more the first iteration after a resume would round differently from the same iteration of an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hpc_det.errors import UsageError


class DataParallel(DistributedDataParallel):
    """With the wrapped model's own attributes and methods in reach."""

    def __init__(self, model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        """`options`: DDP's."""
        super().__init__(model, device_ids=[device] if device.type == "cuda" else None, **options)
        self._given = (device, options)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    alone = False
    """In a validation ranks run at their own pace: nothing may be exchanged there (DDP would send buffers)."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.alone:
            return self.module(*inputs, **options)
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]

    def let_go(self) -> None:
        """Of the process group, which may end now: training is over, and the model is evaluated alone."""
        self.alone = True
        del self.reducer, self.logger, self.process_group

    compresses = False

    def compress_gradients(self) -> None:
        """Exchange them as float16 (torch's fp16_compress_hook)."""
        if not self.compresses:
            self.compresses = True
            self.register_comm_hook(None, default_hooks.fp16_compress_hook)

    @property
    def leaves_bucket_size(self) -> bool:
        """Whether nothing that the trial has asked for goes by buckets: `resize_buckets` may be called."""
        own_hooks = len(self._comm_hooks) - self.compresses
        return not own_hooks and not _SETS_BUCKETS & self._given[1].keys()

    def resize_buckets(self, megabytes: int) -> None:
        """From the next forward pass on; between an optimizer step and that. Collective.

        DDP has no way to do so but a new one, around the same model, whose reducer takes the place of the old.
        """
        device, options = self._given
        del self.reducer, self.logger  # and with them the old one's hooks
        parameters = [*self.module.parameters()]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # to which a pass through the new one would add
        resized = data_parallel(self.module, device, {**options, "bucket_cap_mb": megabytes, "init_sync": False})
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if self.compresses:
            resized.compress_gradients()
        self.reducer, self.logger = resized.reducer, resized.logger
        self._static_graph_delay_allreduce_enqueued = False  # a static graph is looked at anew


_SETS_BUCKETS = {"bucket_cap_mb", "bucket_cap_mb_list", "mixed_precision"}
"""Options of DDP: the last one hooks the model, and would hook a new DDP's once more."""


def data_parallel(model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> DataParallel:
    """`model` in DDP, with its final buckets from the first iteration on."""
    wrapped = DataParallel(model, device, options)
    rebuilds = not options.get("find_unused_parameters") and not options.get("static_graph")
    if rebuilds and _takes_plain_gradients(model):
        _settle_buckets(wrapped)
    return wrapped


def synchronized_batch_norm(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """With torch.nn.SyncBatchNorm for every batch norm. Raises UsageError without a GPU, where torch has none."""
    if device.type != "cuda":
        raise UsageError("wrap_model: sync_batch_norm=True needs GPUs, this rank has none; leave it out on CPUs")
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def share_buffers(models: Iterable[torch.nn.Module]) -> None:
    """Collective: all ranks take rank 0's buffers, as they would at the next training batch."""
    for model in models:
        if shares_buffers(model):
            for buffer in model.module.buffers():
                dist.broadcast(buffer, src=0)


def shares_buffers(model: torch.nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Whether all ranks take rank 0's at each training batch; otherwise each has its own."""
    return isinstance(model, DistributedDataParallel) and model.broadcast_buffers


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

    def forward(self, on_its_device: torch.Tensor) -> torch.Tensor:
        """With an input that it does not need: on a GPU DDP fails without any (IndexError in its _pre_forward)."""
        return torch.stack([parameter.sum().real.float() for parameter in self._summed]).sum()


def _settle_buckets(wrapped: DistributedDataParallel) -> None:
    """One backward pass in parameter order, from which DDP takes the order of arrival for good.

    Now, and not at its next forward pass: by then a resume has put gradients back.
    """
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
