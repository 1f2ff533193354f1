"""A small trial that resumes exactly, unless a hyperparameter makes it keep some state outside of checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

batches = 0


class Centred(torch.nn.Module):
    """Keeps the mean of the records of this rank, as a batch norm does. DDP gives all ranks that of rank 0."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(points.mean(dim=0), 0.1)
        return points - self.mean


class LeakyTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        layers = Centred(), torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        self.model: Any = context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.count = 0
        self.average = 0.0
        """Nothing depends on it, except with `leak: average`."""
        self.generator = torch.Generator().manual_seed(7)

    def build_training_data_loader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        points = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
        return DataLoader(points, self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.build_training_data_loader()

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self.loss(batch) * self.factor()
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def factor(self) -> float:
        global batches
        match self.context.get_hparam("leak"):
            case "counter":
                self.count += 1
                return self.count
            case "global":
                batches += 1
                return batches
            case "generator":
                return float(torch.rand((), generator=self.generator))
            case "average":
                return 1 + self.average
            case "failure" if self.context.get_initial_batch():
                raise ValueError("nobody has tried that")
        return 1

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        return {"error": self.loss(batch)}

    def loss(self, batch: Any) -> torch.Tensor:
        points, values = batch
        return torch.nn.functional.mse_loss(self.model(points), values)
