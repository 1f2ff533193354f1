"""The state of an operator, as TorchTrainer.state_dict() returns it: saving, loading, and sending it to other ranks.

Its keys are those of RaySGD:
epoch                   number of passes over the training data that have begun
operator                what the operator's state_dict() returned
models, optimizers      a list with the state of each
schedulers              a list with the state of each; missing if there are none
amp_native or amp_apex  the state of mixed precision; missing without it
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
from hpc_det.core.state_dicts import keep_types
from hpc_det.distributed.sealed import SealedGroup
from hpc_det.errors import UsageError
from hpc_det.node.disk import temporary_beside
from hpc_det.node.files import flush_folder
from hpc_det.pytorch.strategies.ddp import shares_buffers
from hpc_det.pytorch.strategies.device import mapped
from hpc_det.sgd.operator.options import Amp
from hpc_det.sgd.operator.training_operator import TrainingOperator

SEVERAL = ("models", "optimizers", "schedulers")
"""Keys of a state whose value is a list with the state of each object."""


class NoSuchState(UsageError, FileNotFoundError):
    """The file of a state does not exist. Also a FileNotFoundError, which open() raises."""


def state_of(operator: TrainingOperator, epoch: int) -> dict[str, Any]:
    """Return the state of the operator. Its tensors are not copies: save or copy them before training continues."""
    state: dict[str, Any] = {"epoch": epoch, "operator": operator.state_dict()}
    state |= {name: [part.state_dict() for part in parts] for name, parts in _parts(operator).items()}
    if operator._precision:
        state[_precision_key(operator)] = operator._precision.state_dict()
    return state


def load_state(state: dict[str, Any], operator: TrainingOperator) -> None:
    """Load a state, except `epoch`, into the operator; the operator keeps no reference to the objects in `state`.

    Raises UsageError, with every problem, if the state has other parts than the operator.
    """
    parts = _parts(operator)
    _check(state, parts)
    for model, content in zip(parts["models"], state["models"], strict=True):
        model.load_state_dict(content)
    for optimizer, content in zip(parts["optimizers"], state["optimizers"], strict=True):
        optimizer.load_state_dict(deepcopy(content))
        if isinstance(optimizer, torch.optim.Optimizer):
            # torch casts the state to the data type of the parameters; restore the saved data types.
            keep_types(optimizer, content.get("state", {}))
    for scheduler, content in zip(parts.get("schedulers", []), state.get("schedulers", []), strict=True):
        scheduler.load_state_dict(deepcopy(content))
    # "amp" is the key that older releases of RaySGD wrote.
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
    """Raise UsageError, with every problem, if the state lacks a key or has other numbers of objects than `parts`."""
    problems = [f"state: {name} is missing" for name in ("epoch", "operator") if name not in state]
    counts = {name: (len(state.get(name, [])), len(parts.get(name, []))) for name in SEVERAL}
    problems += [
        f"state: {name} contains {saved}, but the operator has registered {registered}; use the setup() with which the "
        f"state was saved"
        for name, (saved, registered) in counts.items()
        if saved != registered
    ]
    if problems:
        raise UsageError(problems)


# --- the file of TorchTrainer.save: in the format of torch.save, replaced atomically


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write the state to a file atomically: a reader sees the old file or the new one.

    Raises OSError if that fails, and then leaves no partial file.
    """
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
    """Return the state in a file, with its tensors on the CPU.

    `weights_only`: refuse files that contain objects whose loading could run code. Raises NoSuchState (a
    FileNotFoundError), and HpcDetError for a file that is not a state or is refused.
    """
    if not path.exists():
        raise NoSuchState(f"{path}: no such file")
    if weights_only:
        return dict(read(path))
    return dict(torch.load(path, map_location="cpu", weights_only=False))


# --- buffers of models


def share_buffers(operator: TrainingOperator) -> None:
    """Copy the model buffers of rank 0 to all ranks, as DDP would at the next training batch. Collective.

    The buffers of models for which DDP does not do that are unchanged.
    """
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
    """Replace the values of the buffers, which are on one device, by those of rank 0. Collective."""
    # One broadcast of bytes for all buffers: gloo supports only some data types.
    parts = [buffer.contiguous().reshape(-1).view(torch.uint8) for buffer in buffers]
    together = torch.cat(parts)
    dist.broadcast(together, src=0)
    for buffer, taken in zip(buffers, torch.split(together, [part.numel() for part in parts]), strict=True):
        buffer.copy_(taken.clone().view(buffer.dtype).reshape(buffer.shape))


def own_buffers(operator: TrainingOperator) -> list[dict[str, torch.Tensor]]:
    """Return, for each model, the buffers that differ from rank to rank because DDP does not synchronize them."""
    return [
        {} if shares_buffers(wrapped) or not operator.is_distributed else dict(model.named_buffers())
        for model, wrapped in zip(operator._models, operator._wrapped, strict=True)
    ]


def set_own_buffers(operator: TrainingOperator, saved: Sequence[dict[str, torch.Tensor]]) -> None:
    """Restore what `own_buffers` returned."""
    with torch.no_grad():
        for model, values in zip(operator._models, saved, strict=True):
            buffers = dict(model.named_buffers())
            for name, value in values.items():
                buffers[name].copy_(value)


# --- sending data between ranks, and pickling it for snapshots


def broadcast(data: Any, group: SealedGroup) -> Any:
    """Return rank 0's `data` on all ranks; the `data` of other ranks is ignored. Collective over the whole gang.

    The other ranks get new tensors on the CPU. Raises HpcDetError, before unpickling, for bytes that were not sent by a
    rank of this run.
    """
    tensors: list[torch.Tensor] = []
    is_first = dist.get_rank() == 0
    rest = _without_tensors(data, tensors) if is_first else b""
    rest, kinds = group.broadcast((rest, [(tensor.shape, tensor.dtype) for tensor in tensors]))
    if not is_first:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    # broadcast as bytes: gloo supports only some data types
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    # All are started before the first is waited for, so that they overlap.
    for work in [dist.broadcast(part, src=0, async_op=True) for part in parts]:
        work.wait()
    return data if is_first else _WithTensors(rest, tensors).load()


def _without_tensors(data: Any, tensors: list[torch.Tensor]) -> bytes:
    """Return `data` pickled without its tensors, which are appended to `tensors`."""
    file = io.BytesIO()
    _WithoutTensors(file, tensors).dump(data)
    return file.getvalue()


class _WithoutTensors(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors

    def persistent_id(self, value: Any) -> int | None:
        """Return the number that pickle writes instead of a tensor; None: pickle writes the value itself."""
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
    """Return `data` with the tensors in it, at any depth, detached and on the CPU."""
    return mapped(lambda value: value.detach().cpu() if isinstance(value, torch.Tensor) else value, data)


def pickled(data: Any) -> bytes:
    """Return `data` pickled, with CPU tensors as numpy arrays of their bytes; use it for data with small tensors."""
    # torch's own pickling calls torch.save for each tensor, which takes longer than everything else in a snapshot of
    # small tensors.
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _by_its_bytes}
    pickler.dump(data)
    return file.getvalue()


def _by_its_bytes(tensor: torch.Tensor) -> Any:
    """Return the function and arguments with which pickle restores the tensor from a numpy array of its bytes."""
    # Bytes, because numpy lacks some of torch's data types, such as bfloat16.
    if not is_plain(tensor):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    return _of_bytes, (tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on the CPU and fully described by its numbers, data type and shape."""
    is_special = tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return tensor.is_cpu and tensor.layout is torch.strided and not is_special


def _of_bytes(array: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype).reshape(shape)
