"""rank 0's state on every rank, also a large one: tensors go as they are, all else pickled under the gang's seal."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist

from hpc_det.distributed.sealed import SealedGroup
from hpc_det.sgd.rank.state import is_plain


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
