"""`ray.util.sgd.torch.examples.train_example`: points on a line, and the creators of a model that fits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SLOPE, INTERCEPT = 2, 5
"""The line that `data_creator` samples."""


class LinearDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points (x, a x + b), each as two tensors of one element.

    Args:
        a: Slope of the line.
        b: Value of the line at 0.
        size: Number of points, evenly spaced from 0 to below 10.
    """

    def __init__(self, a: float, b: float, size: int = 1000) -> None:
        self.x = torch.arange(size, dtype=torch.float32) * (10 / size)
        self.y = a * self.x + b

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index, None], self.y[index, None]

    def __len__(self) -> int:
        return len(self.x)


def model_creator(config: Mapping[str, Any]) -> nn.Module:
    """Return a linear layer with one input and `config["hidden_size"]` (1) outputs."""
    return nn.Linear(1, config.get("hidden_size", 1))


def optimizer_creator(model: nn.Module, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return SGD with the learning rate `config["lr"]` (0.01)."""
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-2))


def scheduler_creator(optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
    """Return a scheduler that lowers the learning rate by a tenth every five steps."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)


def data_creator(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a training and a validation loader with `config["batch_size"]` (32) points per batch.

    The numbers of points are `config["data_size"]` (1000) and `config["val_size"]` (400).
    """
    sizes = config.get("data_size", 1000), config.get("val_size", 400)
    train, validation = (
        DataLoader(LinearDataset(SLOPE, INTERCEPT, size=size), batch_size=config.get("batch_size", 32))
        for size in sizes
    )
    return train, validation
