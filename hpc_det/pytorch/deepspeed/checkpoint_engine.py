"""Writing and reading the shards of DeepSpeed engines.

Shards are flushed like all files of a checkpoint. Reading them unpickles only tensors, numbers, texts, plain containers
and a few small classes of DeepSpeed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch.serialization import get_unsafe_globals_in_checkpoint, skip_data

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.checkpoint.content import not_loadable, read, stand_ins
from hpc_det.checkpoint.sealed_files import sealed_file
from hpc_det.checkpoint.seals import CRC
from hpc_det.errors import HpcDetError


def stage_called(enum: Any, name: str) -> ZeroStageEnum:
    """Return the member `name` of ZeroStageEnum. It replaces `getattr` while a file is unpickled.

    Python 3.11.0 to 3.11.3 pickle the members of an enum as calls of getattr (enum.py, `__reduce_ex__`).
    """
    if enum is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
        raise pickle.UnpicklingError(f"{name} of {enum} is not loaded, only a stage of ZeRO")
    return ZeroStageEnum[name]


_DEEPSPEEDS_OWN: list[Any] = [
    *(DynamicLossScaler, LossScaler, SubparamShape, ZeroStageEnum, fragment_address),
    (stage_called, "builtins.getattr"),
]
"""Classes in the files of engines besides plain content. They are enums and records: loading them runs no code."""


@contextmanager
def deepspeeds_own_allowed() -> Iterator[None]:
    """Let torch.load(weights_only=True) accept every file that an engine writes, and nothing else, within the block."""
    with stand_ins(also=_DEEPSPEEDS_OWN):
        yield


class ShardFiles(CheckpointEngine):  # type: ignore[misc]  # deepspeed has no types
    """DeepSpeed's checkpoint engine for the engines of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint: tuple[Path, Put] | None = None

    @contextmanager
    def part_of(self, folder: Path, put: Put) -> Iterator[None]:
        """Pass what engines save below `folder` to `put`, within the block.

        Files elsewhere, and all files outside the block, are written at once.
        """
        self._checkpoint = folder, put
        try:
            yield
        finally:
            self._checkpoint = None

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True  # the checkpoint as a whole is committed, see hpc_det.checkpoint.staging

    def save(self, state_dict: Any, path: str) -> None:
        """Save a state dict. Raises HpcDetError for content that `load` would refuse."""
        place = Path(path)
        _check_loadable(place.name, state_dict)
        if self._checkpoint and self._checkpoint[0] in place.parents:
            folder, put = self._checkpoint
            put(str(place.relative_to(folder)), state_dict)
            return
        with sealed_file(place, CRC) as file:
            torch.save(state_dict, file)  # type: ignore[arg-type]  # torch only needs `write` and `flush`

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return a state dict. Raises HpcDetError if the file contains anything else or is damaged."""
        with deepspeeds_own_allowed():
            return read(Path(path), map_location=map_location or "cpu")


def refused_names(file: Path | IO[bytes]) -> list[str]:
    """Return the classes and functions for which `load` would refuse a file, without reading its tensors."""
    with deepspeeds_own_allowed():
        return [str(name) for name in get_unsafe_globals_in_checkpoint(file)]


def _check_loadable(name: str, state: Any) -> None:
    """Raise HpcDetError for a state that `load` would refuse, tested with a file without tensor data."""
    with TemporaryFile() as outline:
        with skip_data():
            torch.save(state, outline)
        outline.seek(0)
        refused = refused_names(outline)
    if refused:
        places = [place for place in not_loadable(state, name) if any(each in place for each in refused)]
        raise HpcDetError(places or [f"{name}: {each} cannot be part of a checkpoint" for each in refused])
