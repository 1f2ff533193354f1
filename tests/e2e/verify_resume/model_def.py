"""A small trial that resumes exactly, unless it is asked to keep a part of its state where no checkpoint has it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from hpc_det.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

batches = 0


class Points(Dataset[Any]):
    def __init__(self, noise: np.random.Generator | None) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        point, value = torch.randn(4, generator=generator), torch.randn(1, generator=generator)
        return point if self.noise is None else point + float(self.noise.normal()), value


class Centred(torch.nn.Module):
    """Keeps the mean of what this rank has seen, as a batch norm does. DDP gives all ranks that of rank 0."""

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
        self.leak = context.get_hparam("leak")
        layers = Centred(), torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
        self.model: Any = context.wrap_model(torch.nn.Sequential(*layers))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01))
        self.generator = torch.Generator().manual_seed(7)
        self.count = 0
        self.average = 0.0
        if self.leak == "optimizer":
            self.scale = torch.nn.Linear(1, 1)
            self.other = torch.optim.Adam(self.scale.parameters())

    def build_training_data_loader(self) -> DataLoader:
        seed = {"data set": 3, "unseeded": None}
        noise = np.random.default_rng(seed[self.leak]) if self.leak in seed else None
        return DataLoader(Points(noise), self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(Points(None), batch_size=8)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, torch.Tensor]:
        points, values = batch
        loss = torch.nn.functional.mse_loss(self.model(points), values) * self.factor()
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def factor(self) -> Any:
        global batches
        if self.leak == "generator":
            return torch.rand(1, generator=self.generator).squeeze()
        if self.leak == "counter":
            self.count += 1
            return self.count
        if self.leak == "global":
            batches += 1
            return batches
        if self.leak == "time":
            return 1 + random.SystemRandom().random()
        if self.leak == "optimizer":
            self.scale(torch.ones(1)).backward()
            self.other.step()
            return self.scale.weight.item()
        return 1.0

    def evaluate_batch(self, batch: Any) -> dict[str, torch.Tensor]:
        points, values = batch
        error = torch.nn.functional.mse_loss(self.model(points), values)
        return {"error": error + self.average if self.leak == "average" else error}
