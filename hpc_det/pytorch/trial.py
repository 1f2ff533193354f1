"""What a user implements."""

from __future__ import annotations

from typing import Any

import torch

from hpc_det.pytorch.callback import PyTorchCallback
from hpc_det.pytorch.context import PyTorchTrialContext
from hpc_det.pytorch.data import DataLoader, TorchData


class PyTorchTrial:
    """Subclass this; wrap models, optimizers and schedulers in `__init__`.

    `train_batch`, both loaders and `evaluate_batch` are required.
    """

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context

    def build_training_data_loader(self) -> DataLoader:
        raise NotImplementedError

    def build_validation_data_loader(self) -> DataLoader:
        raise NotImplementedError

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """One batch of this rank, on its device. Calls `context.backward` and `context.step_optimizer`.

        `batch_idx` counts from the start of the trial. Returns scalars by name; a bare tensor is the loss.
        """
        raise NotImplementedError

    def evaluate_batch(self, batch: TorchData) -> dict[str, Any]:
        """One batch of this rank's share of the validation data, without gradients, models in eval mode."""
        raise NotImplementedError

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


REQUIRED = ("train_batch", "build_training_data_loader", "build_validation_data_loader", "evaluate_batch")


def missing_methods(trial_class: type[PyTorchTrial]) -> list[str]:
    return [name for name in REQUIRED if getattr(trial_class, name) is getattr(PyTorchTrial, name)]
