"""Sharded tensors (torch's DTensor) in the files of a checkpoint: saving and loading.

  state_dict.pth    a meta tensor for each: its shape and type, without numbers                      rank 0
  shard-R.pth       {path: {"offset": [...], "part": tensor}}: the part of the tensor at `path` of    each rank
                    state_dict.pth, such as "models_state_dict/0/layer.weight"

Each rank writes its own parts, and reads the parts that it needs from any file: no rank ever holds a whole model, and
nothing is sent. torch.distributed.checkpoint is not used: it gathers its plans and stores its metadata as pickles.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpc_det.checkpoint.node_folders import shard_file
from hpc_det.checkpoint.rank_files import RankFiles, StoredFile
from hpc_det.core.state_dicts import parameters_of
from hpc_det.errors import HpcDetError

Shards = dict[str, dict[str, Any]]
"""Content of one shard-R.pth."""


_EVERY = "shard-*.pth"


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Return whether each rank has a part of the tensor."""
    return isinstance(tensor, DTensor)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a sharded tensor; any other tensor as a whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- saving


def without_shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with a meta tensor for each sharded one."""

    def emptied(path: str, value: torch.Tensor) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, DTensor) else value

    changed: dict[str, Any] = _mapped(emptied, state)
    return changed


def shards_in(state: dict[str, Any]) -> Shards:
    """Return this rank's part of each sharded tensor. Of identical copies on several ranks, only the first is saved."""
    shards: Shards = {}

    def take(path: str, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, DTensor) and _is_first_copy(value):
            _, offset = _place(value)
            shards[path] = {"offset": [*offset], "part": value.to_local()}
        return value

    _mapped(take, state)
    return shards


def _is_first_copy(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate() or ()
    placements = zip(coordinate, tensor.placements, strict=True)
    return all(place == 0 for place, placement in placements if placement.is_replicate())


# --- loading


class StoredShards:
    """The shards in the folder of a checkpoint, for a gang of any size. Files are opened when needed."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        """`rank`: the reading rank; its own file is searched first."""
        self._folder = folder
        self._rank = rank
        self._opened: list[Shards] = []

    def fitted(self, content: Any, path: str, likes: Mapping[str, torch.Tensor]) -> Any:
        """Return a state_dict at `path` of state_dict.pth, with its tensors as this rank needs them.

        `likes`: for the path of a tensor, or of its map, the tensor into which it will be copied. If that is sharded,
        this rank's part is returned, else all of it. Raises HpcDetError if a part is in no shard.
        """

        def fit(there: str, value: torch.Tensor) -> torch.Tensor:
            return self._fitted(there, value, likes.get(there, likes.get(there.rpartition("/")[0])))

        return _mapped(fit, content, path)

    def _fitted(self, path: str, value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
        if isinstance(like, DTensor) and like.shape == value.shape:
            shape, offset = _place(like)
            return _distributed(self._part(path, value, offset, shape), like)
        return self._part(path, value, [0] * value.ndim, value.shape) if value.is_meta else value

    def _part(self, path: str, value: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Return a copy of the part, since the files may be deleted while it is in use."""
        if not value.is_meta:
            return _cut(value, offset, shape).clone()
        part = torch.empty(shape, dtype=value.dtype)
        missing = part.numel()
        for shards in self._every():
            if stored := shards.get(path):
                missing -= _copy_overlap(stored["part"], stored["offset"], part, offset)
            if not missing:
                return part
        raise HpcDetError(
            f"{self._folder}: {path}: {missing} of {part.numel()} numbers are in no {_EVERY}; use another checkpoint"
        )

    def _every(self) -> Iterator[Shards]:
        yield from [*self._opened]
        for file in self._unopened:
            self._opened.append(file.read_mapped())
            yield self._opened[-1]

    @cached_property
    def _unopened(self) -> Iterator[StoredFile]:
        """The files that are not open yet, this rank's first."""
        files = RankFiles(self._folder)
        own = files.find(shard_file(self._rank))
        return chain([own] if own else [], (file for file in files.every(_EVERY) if file != own))


def likes_of(owner: Any, path: str) -> dict[str, torch.Tensor]:
    """Return the targets of the tensors of a state_dict at `path`: a model's own tensors, an optimizer's parameters."""
    if isinstance(owner, torch.nn.Module):
        return {f"{path}/{name}": value for name, value in owner.state_dict().items()}
    if isinstance(owner, torch.optim.Optimizer):
        return {f"{path}/state/{number}": parameter for number, parameter in enumerate(parameters_of(owner))}
    return {}


def part_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the whole `value`, sharded like `like`; all of `value` if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return value.to(like.device)
    shape, offset = _place(like)
    return _distributed(_cut(value, offset, shape).clone(), like)


# --- parts


def _place(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """Return shape and offset of this rank's part, as torch's own checkpoints ask a DTensor for them."""
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return chunk.sizes, chunk.offsets


def _distributed(part: torch.Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        part.to(like.to_local().device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _cut(tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    return tensor[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]


def _copy_overlap(
    source: torch.Tensor, source_offset: Sequence[int], target: torch.Tensor, target_offset: Sequence[int]
) -> int:
    """Copy the overlap of two parts of one tensor, and return its number of elements."""
    first = [max(pair) for pair in zip(source_offset, target_offset, strict=True)]
    ends = [
        min(s + s_count, t + t_count)
        for s, s_count, t, t_count in zip(source_offset, source.shape, target_offset, target.shape, strict=True)
    ]
    shape = [max(end - begin, 0) for begin, end in zip(first, ends, strict=True)]
    if math.prod(shape):
        of_source = _cut(source, [a - b for a, b in zip(first, source_offset, strict=True)], shape)
        _cut(target, [a - b for a, b in zip(first, target_offset, strict=True)], shape).copy_(of_source)
    return math.prod(shape)


def _mapped(function: Callable[[str, torch.Tensor], torch.Tensor], content: Any, path: str = "") -> Any:
    """Return the same nesting with function(path, tensor) in place of each tensor."""
    if isinstance(content, torch.Tensor):
        return function(path, content)
    if type(content) in (dict, OrderedDict):
        changed = copy.copy(content)  # a model's state_dict is one with versions (_metadata) beside its items
        for name, value in content.items():
            changed[name] = _mapped(function, value, f"{path}/{name}" if path else str(name))
        return changed
    if type(content) is list:
        return [_mapped(function, value, f"{path}/{number}") for number, value in enumerate(content)]
    return content
