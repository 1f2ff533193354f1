"""How DeepSpeed engines write and read their shards: checksummed and flushed like all files of a checkpoint, and read
without unpickling anything but tensors, numbers, texts, plain containers and a few of DeepSpeed's own small classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint

from hpc_det.checkpoint.checksummed import checksummed
from hpc_det.checkpoint.committed import FileEntry
from hpc_det.core.checkpoint import not_loadable, read
from hpc_det.core.numpy_values import stand_ins
from hpc_det.errors import HpcDetError


def stage_called(enum: Any, name: str) -> ZeroStageEnum:
    """For `getattr`, by which Python 3.11.0 to 3.11.3 pickle the member of an enum (its enum.py, `__reduce_ex__`)."""
    if enum is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"{name} of {enum} is not loaded, only a stage of ZeRO")
    return ZeroStageEnum[name]


_DEEPSPEEDS_OWN: list[Any] = [
    *(DynamicLossScaler, LossScaler, SubparamShape, ZeroStageEnum, fragment_address),
    (stage_called, "builtins.getattr"),
]
"""What engines of all kinds put into their files beside plain content. Numbers with names: loading runs none of it."""


@contextmanager
def deepspeeds_own_allowed() -> Iterator[None]:
    """Within, torch.load(weights_only=True) takes every file that an engine writes, and no more."""
    with stand_ins(also=_DEEPSPEEDS_OWN):
        yield


class ShardFiles(CheckpointEngine):  # type: ignore[misc]  # deepspeed has no types
    """The way of one rank's engines to their files. Training waits for each: it is on disk when `save` returns."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[Path, FileEntry] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True  # the checkpoint as a whole is committed, see hpc_det.checkpoint.staging

    def save(self, state_dict: Any, path: str) -> None:
        """Raises HpcDetError for what `load` would refuse."""
        with checksummed(Path(path)) as file:
            torch.save(state_dict, file)  # type: ignore[arg-type]  # anything that writes will do
        _check_loadable(Path(path), state_dict)
        self._entries[Path(path)] = file.entry

    def load(self, path: str, map_location: Any = None) -> Any:
        """Raises HpcDetError where it holds anything else, or is damaged."""
        with deepspeeds_own_allowed():
            return read(Path(path), map_location=map_location or "cpu")

    def take(self, folder: Path) -> dict[str, FileEntry]:
        """What was saved below `folder` since the last call, by its name there; all others are forgotten."""
        entries, self._entries = self._entries, {}
        return {str(path.relative_to(folder)): entry for path, entry in entries.items() if folder in path.parents}


def refused_names(path: Path) -> list[str]:
    """The classes and functions of a file that `load` would refuse it for; torch finds them without its tensors."""
    with deepspeeds_own_allowed():
        return [str(name) for name in get_unsafe_globals_in_checkpoint(path)]


def _check_loadable(path: Path, state: Any) -> None:
    if refused := refused_names(path):
        places = [place for place in not_loadable(state, path.name) if any(name in place for name in refused)]
        raise HpcDetError(places or [f"{path.name}: {name} cannot be part of a checkpoint" for name in refused])
