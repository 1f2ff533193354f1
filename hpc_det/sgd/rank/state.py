"""The state of an operator: what TorchTrainer.state_dict() gives and takes, in a file, and on its way to other ranks.

Its keys are RaySGD's:
epoch            passes over the training data that have begun
operator         what the user's operator adds
models, optimizers, schedulers    one state each; no schedulers, no key
amp_native, amp_apex              of mixed precision; one at most
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_det.checkpoint.content import read
from hpc_det.distributed.sealed import SealedGroup
from hpc_det.errors import UsageError
from hpc_det.node.disk import temporary_beside
from hpc_det.node.files import flush_folder
from hpc_det.pytorch.state.state import keep_types
from hpc_det.pytorch.strategies.ddp import shares_buffers
from hpc_det.pytorch.strategies.device import mapped
from hpc_det.sgd.operator.options import Amp
from hpc_det.sgd.operator.training_operator import TrainingOperator

SEVERAL = ("models", "optimizers", "schedulers")


class NoSuchState(UsageError, FileNotFoundError):
    """What open() raises."""


def state_of(operator: TrainingOperator, epoch: int) -> dict[str, Any]:
    """Tensors are the live ones, where they are: to be saved or copied before training goes on."""
    state: dict[str, Any] = {"epoch": epoch, "operator": operator.state_dict()}
    state |= {name: [part.state_dict() for part in parts] for name, parts in _parts(operator).items()}
    if operator._precision:
        state[_precision_key(operator)] = operator._precision.state_dict()
    return state


def load_state(state: dict[str, Any], operator: TrainingOperator) -> None:
    """All but `epoch`; nothing trains on with the objects of `state`.

    Raises UsageError where it is the state of something else, with all that is wrong.
    """
    parts = _parts(operator)
    _check(state, parts)
    for model, content in zip(parts["models"], state["models"], strict=True):
        model.load_state_dict(content)
    for optimizer, content in zip(parts["optimizers"], state["optimizers"], strict=True):
        optimizer.load_state_dict(deepcopy(content))
        if isinstance(optimizer, torch.optim.Optimizer):
            keep_types(optimizer, content.get("state", {}))
    for scheduler, content in zip(parts.get("schedulers", []), state.get("schedulers", []), strict=True):
        scheduler.load_state_dict(deepcopy(content))
    if operator._precision and (precision := state.get(_precision_key(operator), state.get("amp"))):
        operator._precision.load_state_dict(precision)
    if state["operator"] is not None:
        operator.load_state_dict(deepcopy(state["operator"]))


def _parts(operator: TrainingOperator) -> dict[str, list[Any]]:
    parts: dict[str, list[Any]] = {"models": operator._models, "optimizers": operator._optimizers}
    return {**parts, "schedulers": operator._schedulers} if operator._schedulers else parts


def _precision_key(operator: TrainingOperator) -> str:
    return "amp_native" if isinstance(operator._precision, Amp) else "amp_apex"


def _check(state: dict[str, Any], parts: dict[str, list[Any]]) -> None:
    problems = [f"state: {name} is missing" for name in ("epoch", "operator") if name not in state]
    counts = {name: (len(state.get(name, [])), len(parts.get(name, []))) for name in SEVERAL}
    problems += [
        f"state: {name} holds {saved}, the operator has registered {registered}; use the setup that it was saved with"
        for name, (saved, registered) in counts.items()
        if saved != registered
    ]
    if problems:
        raise UsageError(problems)


# --- the file of TorchTrainer.save: torch.save's, replaced in one step


def write_state(state: dict[str, Any], path: Path) -> None:
    """A reader sees the old file or the new one. Raises OSError; nothing half-written is left then."""
    partial = temporary_beside(path)
    try:
        with partial.open("xb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    flush_folder(path.parent)


def read_state(path: Path, weights_only: bool) -> dict[str, Any]:
    """With its tensors on the CPU. Raises NoSuchState, and HpcDetError for a file that holds anything else."""
    if not path.exists():
        raise NoSuchState(f"{path}: no such file")
    if weights_only:
        return dict(read(path))
    return dict(torch.load(path, map_location="cpu", weights_only=False))


# --- buffers of models


def share_buffers(operator: TrainingOperator) -> None:
    """Rank 0's on all ranks, as the next training batch has them anyhow. Collective."""
    shared = [
        buffer
        for model, wrapped in zip(operator._models, operator._wrapped, strict=True)
        if shares_buffers(wrapped)
        for buffer in model.buffers()
        if buffer.numel()
    ]
    with torch.no_grad():
        for device in dict.fromkeys(buffer.device for buffer in shared):
            _take_rank_0s([buffer for buffer in shared if buffer.device == device])


def _take_rank_0s(buffers: Sequence[torch.Tensor]) -> None:
    """Of one device, in one go; gloo knows few types, and every type is bytes."""
    parts = [buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    together = torch.cat(parts)
    dist.broadcast(together, src=0)
    for buffer, taken in zip(buffers, torch.split(together, [part.numel() for part in parts]), strict=True):
        buffer.copy_(taken.clone().view(buffer.dtype).reshape(buffer.shape))


def own_buffers(operator: TrainingOperator) -> list[dict[str, torch.Tensor]]:
    """By model: those of which each of several ranks has its own, so that rank 0's say nothing of this one's."""
    return [
        {} if shares_buffers(wrapped) or not operator.is_distributed else dict(model.named_buffers())
        for model, wrapped in zip(operator._models, operator._wrapped, strict=True)
    ]


def set_own_buffers(operator: TrainingOperator, saved: Sequence[dict[str, torch.Tensor]]) -> None:
    with torch.no_grad():
        for model, values in zip(operator._models, saved, strict=True):
            buffers = dict(model.named_buffers())
            for name, value in values.items():
                buffers[name].copy_(value)


# --- from rank to rank, and into snapshots


def broadcast(data: Any, group: SealedGroup) -> Any:
    """Collective over the whole gang. What the others gave is not looked at; they get tensors of their own, on the CPU.

    Raises HpcDetError for what no rank of this run has sent, before unpickling it.
    """
    tensors: list[torch.Tensor] = []
    is_first = dist.get_rank() == 0
    rest = _without_tensors(data, tensors) if is_first else b""
    rest, kinds = group.broadcast((rest, [(tensor.shape, tensor.dtype) for tensor in tensors]))
    if not is_first:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    # gloo knows few types, and every type is bytes
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    for work in [dist.broadcast(part, src=0, async_op=True) for part in parts]:
        work.wait()
    return data if is_first else _WithTensors(rest, tensors).load()


def _without_tensors(data: Any, tensors: list[torch.Tensor]) -> bytes:
    """`data` pickled, but for its tensors, which are appended to `tensors`."""
    file = io.BytesIO()
    _WithoutTensors(file, tensors).dump(data)
    return file.getvalue()


class _WithoutTensors(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        """pickle puts this in the place of `value`. Tensors that are more than their numbers are left to it."""
        if type(value) is not torch.Tensor or not is_plain(value):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1


class _WithTensors(pickle.Unpickler):
    def __init__(self, rest: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


def on_cpu(data: Any) -> Any:
    """Its tensors, however nested."""
    return mapped(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, data)


def pickled(data: Any) -> bytes:
    """On the CPU; for small tensors, whose pickling by torch, with a file for each, takes longer than all else."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _by_its_bytes}
    pickler.dump(data)
    return file.getvalue()


def _by_its_bytes(tensor: torch.Tensor) -> Any:
    """numpy knows few types, and every type is bytes."""
    if not is_plain(tensor):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    return _of_bytes, (tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether numbers, a type and a shape are all of it, and at hand."""
    is_special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.layout is torch.strided and not is_special


def _of_bytes(array: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype).reshape(shape)
