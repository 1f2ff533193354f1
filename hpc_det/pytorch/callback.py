"""Hooks into the loop, with state that is part of every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class PyTorchCallback:
    """Override what is needed. A callback is saved and restored under its name in `build_callbacks()`."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; asked of rank 0's callback."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Every rank gets what rank 0 saved."""

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        """After the last batch of an epoch and the scheduler steps; every rank."""

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        """The metrics reduced over all ranks; every rank."""

    def on_checkpoint_write_end(self, checkpoint_dir: Path) -> None:
        """The files are written and not yet committed; rank 0. Files added here become part of the checkpoint."""
