"""The file that TorchTrainer.save writes: torch.save's, replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hpc_det.checkpoint.content import read
from hpc_det.errors import UsageError
from hpc_det.node.disk import temporary_beside
from hpc_det.node.files import flush_folder


class NoSuchState(UsageError, FileNotFoundError):
    """What open() raises."""


def save_state(state: dict[str, Any], path: Path) -> None:
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


def load_state(path: Path, weights_only: bool) -> dict[str, Any]:
    """With its tensors on the CPU. Raises NoSuchState, and HpcDetError for a file that holds anything else."""
    if not path.exists():
        raise NoSuchState(f"{path}: no such file")
    if weights_only:
        return dict(read(path))
    return dict(torch.load(path, map_location="cpu", weights_only=False))
