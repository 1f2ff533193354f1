"""DistributedDataParallel whose sums do not depend on when the process started; hpc_det.core.ddp_buckets explains why.

DDP also knows only the parameters that required gradients when it was created. `DataParallel` compares them at each
forward pass in training. If some were frozen or thawed since, it creates a new reducer, whose buckets depend only on
the trained parameters.
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

from hpc_det.core.ddp_buckets import settle_buckets
from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.parameters import shown_names


class DataParallel(DistributedDataParallel):
    """DDP that also gives access to the wrapped model's attributes and methods."""

    def __init__(self, model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> None:
        """`options`: arguments of DistributedDataParallel."""
        super().__init__(model, device_ids=[device] if device.type == "cuda" else None, **options)
        self._given = (device, options)
        self._bucket_mb: dict[str, int] = {}
        """Argument of DDP that `resize_buckets` has set."""
        self._watched = [*model.parameters()]
        self._trained = self._requiring_gradients()
        """For each watched parameter, whether the reducer exchanges its gradient."""
        self._changes = 0
        """Number of changes of the trained parameters."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    alone = False
    """True in validations, where ranks run at their own pace and exchange nothing (DDP would send buffers)."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        if self.alone:
            return self.module(*inputs, **options)
        if torch.is_grad_enabled():
            self.follow_freezing()
        return super().forward(*inputs, **options)  # type: ignore[no-untyped-call]

    def let_go(self) -> None:
        """Release the process group after training, so that it may end; the model is evaluated alone from then on."""
        self.alone = True
        del self.reducer, self.logger, self.process_group

    compresses = False
    """True if gradients are exchanged as float16."""

    def compress_gradients(self) -> None:
        """Exchange gradients as float16 (torch's fp16_compress_hook)."""
        if not self.compresses:
            self.compresses = True
            self.register_comm_hook(None, default_hooks.fp16_compress_hook)

    @property
    def leaves_bucket_size(self) -> bool:
        """True if `resize_buckets` may be called: the trial uses no option that depends on buckets."""
        hooks = getattr(self, "_comm_hooks", None)  # another torch may not have it
        return hooks is not None and len(hooks) == self.compresses and not _SETS_BUCKETS & self._given[1].keys()

    def resize_buckets(self, megabytes: int) -> None:
        """Use buckets of this size from the next forward pass on. Call it between an optimizer step and that pass.
        Collective.
        """
        self._bucket_mb = {"bucket_cap_mb": megabytes}
        self._renew_reducer()

    # --- what is frozen, and thawed

    def follow_freezing(self) -> None:
        """Exchange the gradients of all parameters that require them now. Collective if these have changed.

        A model that is frozen as a whole, such as a GAN's discriminator for a moment, exchanges nothing. Raises
        UsageError if ranks have changed differently, and for an option of DDP that fixes the trained parameters.
        """
        now = self._requiring_gradients()
        if now == self._trained or not any(now):
            return
        if "mixed_precision" in self._given[1]:
            raise UsageError(
                f"{self._what_changed(now)}; DistributedDataParallel's mixed_precision fixes the trained "
                f"parameters at wrap_model: freeze and thaw before that, or remove mixed_precision and use "
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
                f"passes, and each time DDP is created again, which takes milliseconds; if this happens in each "
                f"batch, wrap the parameters that are frozen together as a separate model",
                stacklevel=2,
            )

    @property
    def has_other_parameters(self) -> bool:
        """True if layers were added or replaced after the model was wrapped, which the reducer does not know."""
        return [*map(id, self._watched)] != [*map(id, self.module.parameters())]

    def _requiring_gradients(self) -> list[bool]:
        return [*map(_REQUIRES_GRAD, self._watched)]

    def _agree_on(self, now: Sequence[bool]) -> None:
        """Raise UsageError if another rank trains other parameters of the model than this one. Collective."""
        digest = int.from_bytes(hashlib.sha256(bytes(now)).digest()[:7], "big")  # fits into an int64
        own = torch.tensor([digest, sum(now)], device=self._given[0])
        by_rank = [torch.zeros_like(own) for _ in range(self.process_group.size())]
        gathering = dist.all_gather(by_rank, own, group=self.process_group, async_op=True)
        if not _comes_in_time(gathering, _WORTH_A_LINE_S):
            print(f"hpc-det: {self._what_changed(now)}, and waits for the other ranks", flush=True)
            if not _comes_in_time(gathering, _LIMIT_S):
                raise UsageError(
                    f"{self._what_changed(now)}, but not all ranks have done so after {_LIMIT_S} s; freeze and thaw "
                    f"the same parameters at the same batch on all ranks"
                )
        gathering.wait()
        others = {rank: int(theirs[1]) for rank, theirs in enumerate(by_rank) if not torch.equal(theirs, own)}
        if others:
            counts = ", ".join(f"rank {rank} {count}" for rank, count in others.items())
            raise UsageError(
                f"{self._what_changed(now)}, and trains {sum(now)} of {len(now)}, but other ranks train other "
                f"parameters: {counts}; freeze and thaw the same parameters at the same batch on all ranks"
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
        """Average gradients of newly frozen parameters that wait for an optimizer step, over all ranks. Collective.

        DDP no longer exchanges them.
        """
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
        """Create a new reducer for the parameters that are trained now. Collective.

        DDP offers no other way: a new DDP is created around the same model, and its reducer replaces the old one.
        """
        device, options = self._given
        del self.reducer, self.logger  # removes the old reducer's hooks
        gradients = [parameter.grad for parameter in self._watched]
        for parameter in self._watched:
            parameter.grad = None  # a pass through the new DDP would add to it
        renewed = data_parallel(self.module, device, {**options, **self._bucket_mb, "init_sync": False})
        self.reducer, self.logger = renewed.reducer, renewed.logger
        for hook, state in self._comm_hooks:
            renewed.register_comm_hook(state, hook)
        # In the first iteration of a static graph, DDP enqueues its all-reduce: so it must for the new reducer.
        self._static_graph_delay_allreduce_enqueued = False
        self._trained = renewed._trained
        for parameter, gradient in zip(self._watched, gradients, strict=True):
            self.put_gradient(parameter, gradient)

    def put_gradient(self, parameter: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Set a gradient that waits for an optimizer step."""
        if gradient is not None and self.find_unused_parameters and parameter.requires_grad:
            with self.no_sync():  # a backward pass, so that DDP notes the parameter as used since the last step
                torch.autograd.backward(parameter, gradient)
        parameter.grad = gradient


_REQUIRES_GRAD = attrgetter("requires_grad")

_MANY_CHANGES = 20
"""Number of changes of the trained parameters at which a warning is printed."""
_WORTH_A_LINE_S = 60
"""Seconds after which a message is printed that a rank waits for the others."""
_LIMIT_S = 1800
"""Seconds after which a rank stops waiting for the others; gloo has the same limit for any exchange."""


def _comes_in_time(work: dist.Work, seconds: float) -> bool:
    """Return whether all ranks take part in an exchange within `seconds`.

    A rank whose trained parameters have not changed does not: it waits for the others in the exchange of gradients.
    """
    end = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


_SETS_BUCKETS = {"bucket_cap_mb", "bucket_cap_mb_list", "mixed_precision"}
"""Options of DDP that fix its buckets. mixed_precision also adds hooks to the model; a new DDP would add them twice."""


def data_parallel(model: torch.nn.Module, device: torch.device, options: dict[str, Any]) -> DataParallel:
    """Return `model` in DDP, with its final buckets from the first iteration on."""
    wrapped = DataParallel(model, device, options)
    settle_buckets(wrapped)
    return wrapped


def synchronized_batch_norm(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return the model with torch.nn.SyncBatchNorm. Raises UsageError without a GPU, which torch requires."""
    if device.type != "cuda":
        raise UsageError("wrap_model: sync_batch_norm=True needs GPUs, but this rank has none; remove it on CPUs")
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return converted


def share_buffers(models: Iterable[torch.nn.Module]) -> None:
    """Broadcast rank 0's buffers, as the next training batch would. Collective."""
    for model in models:
        if shares_buffers(model):
            for buffer in model.module.buffers():
                dist.broadcast(buffer, src=0)


def shares_buffers(model: torch.nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether all ranks take rank 0's buffers at each training batch; otherwise each has its own."""
    return isinstance(model, DistributedDataParallel) and model.broadcast_buffers
