"""DistributedDataParallel whose sums do not depend on when the process started.

DDP lays gradients into buckets by parameter order for its first iteration, and by order of arrival from then on. A
ring all-reduce adds an element's parts in an order that follows from its place in the bucket, so with three ranks and
more the first iteration after a resume would round differently from the same iteration of an undisturbed run.

DDP also knows only the parameters that required gradients when it was made. `DataParallel` compares them at each
forward pass in training and, where some were frozen or thawed since, makes a new reducer, whose buckets depend on what
is trained alone.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.parameters import shown_names


class DataParallel(DistributedDataParallel):
    """With the wrapped model's own attributes and methods in reach."""

    def __init__(self, model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        """`options`: DDP's."""
        super().__init__(model, device_ids=[device] if device.type == "cuda" else None, **options)
        self._given = (device, options)
        self._bucket_mb: dict[str, int] = {}
        """Of `resize_buckets`."""
        self._watched = [*model.parameters()]
        self._trained = self._requiring_gradients()
        """Which of those the reducer exchanges the gradients of."""
        self._changes = 0
        """How often that has changed."""

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
        if torch.is_grad_enabled():
            self.follow_freezing()
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
        """From the next forward pass on; between an optimizer step and that. Collective."""
        self._bucket_mb = {"bucket_cap_mb": megabytes}
        self._renew_reducer()

    # --- what is frozen, and thawed

    def follow_freezing(self) -> None:
        """Exchange the gradients of all parameters that require them now. Collective where these have changed.

        A model that is frozen as a whole, as a GAN's discriminator is for a moment, has nothing to exchange. Raises
        UsageError where ranks have not changed the same, and for an option of DDP that settles what is trained.
        """
        now = self._requiring_gradients()
        if now == self._trained or not any(now):
            return
        if "mixed_precision" in self._given[1]:
            raise UsageError(
                f"{self._what_changed(now)}; DistributedDataParallel's mixed_precision settles at wrap_model which "
                f"parameters are trained: freeze and thaw before that, or leave mixed_precision out and use "
                f"context.experimental.use_amp()"
            )
        self._agree_on(now)
        frozen = [p for p, before, after in zip(self._watched, self._trained, now, strict=True) if before > after]
        self._share_gradients(frozen)
        self._renew_reducer()
        self._changes += 1
        if self._changes == _MANY_CHANGES:
            warnings.warn(
                f"{type(self.module).__name__}: parameters were frozen or thawed before {_MANY_CHANGES} forward "
                f"passes, and each time DDP is set up anew, which takes milliseconds; where that happens in each "
                f"batch, wrap what is frozen together as a model of its own",
                stacklevel=2,
            )

    @property
    def has_other_parameters(self) -> bool:
        """Whether layers were added or replaced since the model was wrapped, of which the reducer knows nothing."""
        return [*map(id, self._watched)] != [*map(id, self.module.parameters())]

    def _requiring_gradients(self) -> list[bool]:
        return [*map(_REQUIRES_GRAD, self._watched)]

    def _agree_on(self, now: Sequence[bool]) -> None:
        """Collective. Raises UsageError where another rank trains other parameters of the model than this one."""
        digest = int.from_bytes(hashlib.sha256(bytes(now)).digest()[:7], "big")
        own = torch.tensor([digest, sum(now)], device=self._given[0])
        by_rank = [torch.zeros_like(own) for _ in range(self.process_group.size())]
        gathering = dist.all_gather(by_rank, own, group=self.process_group, async_op=True)
        if not _comes_in_time(gathering, _WORTH_A_LINE_S):
            print(f"hpc-det: {self._what_changed(now)}, and waits for all ranks to do so", flush=True)
            if not _comes_in_time(gathering, _LIMIT_S):
                raise UsageError(
                    f"{self._what_changed(now)}, and not all ranks have after {_LIMIT_S} s; freeze and thaw the same "
                    f"parameters at the same batch on all ranks"
                )
        gathering.wait()
        others = {rank: int(theirs[1]) for rank, theirs in enumerate(by_rank) if not torch.equal(theirs, own)}
        if others:
            counts = ", ".join(f"rank {rank} {count}" for rank, count in others.items())
            raise UsageError(
                f"{self._what_changed(now)}, and trains {sum(now)} of {len(now)}; not the same ones as other ranks, "
                f"which train so many: {counts}; freeze and thaw the same parameters at the same batch on all ranks"
            )

    def _what_changed(self, now: Sequence[bool]) -> str:
        before = dict(zip(map(id, self._watched), self._trained, strict=True))
        named = [(name, p) for name, p in self.module.named_parameters() if before[id(p)] != p.requires_grad]
        what = {
            word: [name for name, parameter in named if parameter.requires_grad is thawed]
            for word, thawed in (("thawed", True), ("frozen", False))
        }
        shown = (f"{word} {len(names)} parameters ({shown_names(names)})" for word, names in what.items() if names)
        rank, kind = self.process_group.rank(), type(self.module).__name__
        return f"{kind}: since the last batch rank {rank} has {' and '.join(shown)}"

    def _share_gradients(self, frozen: Sequence[torch.nn.Parameter]) -> None:
        """Collective. Those that wait for an optimizer step: no exchange of DDP's comes to them any more."""
        if not frozen:
            return
        device, size = self._given[0], self.process_group.size()
        waiting = torch.tensor([parameter.grad is not None for parameter in frozen], dtype=torch.uint8, device=device)
        dist.all_reduce(waiting, dist.ReduceOp.MAX, group=self.process_group)
        for parameter, waits in zip(frozen, waiting.tolist(), strict=True):
            if waits:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
                dist.all_reduce(gradient, group=self.process_group)
                parameter.grad = gradient.div_(size)

    def _renew_reducer(self) -> None:
        """For what is trained now. Collective.

        DDP has no way to do so but a new one, around the same model, whose reducer takes the place of the old.
        """
        device, options = self._given
        del self.reducer, self.logger  # and with them the old one's hooks
        gradients = [parameter.grad for parameter in self._watched]
        for parameter in self._watched:
            parameter.grad = None  # to which a pass through the new one would add
        renewed = data_parallel(self.module, device, {**options, **self._bucket_mb, "init_sync": False})
        self.reducer, self.logger = renewed.reducer, renewed.logger
        for hook, state in self._comm_hooks:
            renewed.register_comm_hook(state, hook)
        self._static_graph_delay_allreduce_enqueued = False  # a static graph is looked at anew
        self._trained = renewed._trained
        for parameter, gradient in zip(self._watched, gradients, strict=True):
            self.put_gradient(parameter, gradient)

    def put_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """One that waits for an optimizer step."""
        if gradient is not None and self.find_unused_parameters and parameter.requires_grad:
            with self.no_sync():  # DDP notes which ones were used since the last optimizer step
                torch.autograd.backward(parameter, gradient)
        parameter.grad = gradient


_REQUIRES_GRAD = attrgetter("requires_grad")

_MANY_CHANGES = 20

_WORTH_A_LINE_S = 60
_LIMIT_S = 1800
"""As gloo has for any exchange."""


def _comes_in_time(work: dist.Work, seconds: float) -> bool:
    """Whether all ranks take part in an exchange: one that has nothing to change waits in another one."""
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


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
