"""Runners of an operator with every kind of state: momentum, schedule, dropout, augmentation and custom state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hpc_det.distributed.rng import seed_everything
from hpc_det.sgd.operator.options import BATCH_SIZE
from hpc_det.sgd.operator.training_operator import TrainingOperator
from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.runner import Runner


class Augmented(Dataset[Any]):
    """y = 2 x + 5, with a small random offset of each x."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x = torch.tensor([index / self.length, random.random() / 9, np.random.random() / 9, float(torch.rand(())) / 9])
        return x, torch.tensor([2 * index / self.length + 5]), index


class Regression(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        seed_everything(self.world_rank)
        torch.manual_seed(config.get("seed", 3))
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8)
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=scheduler,
            ddp_args=config.get("ddp_args"),
        )
        length, workers = config.get("length", 42), config.get("workers", 0)
        options = {"batch_size": config[BATCH_SIZE], "num_workers": workers}
        options["persistent_workers"] = config.get("persistent", False)
        self.register_data(
            train_loader=DataLoader(Augmented(length), shuffle=True, **options),
            validation_loader=DataLoader(Augmented(length), **options),
        )
        self.seen: list[int] = []

    def train_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        *pair, indices = batch
        self.seen += indices.tolist()
        return {**super().train_batch(pair, batch_info), "draw": random.random() + np.random.random()}

    def validate_batch(self, batch: Any, batch_info: Any) -> dict[str, Any]:
        return super().validate_batch(batch[:2], batch_info)

    def state_dict(self) -> dict[str, Any]:
        """Return a state that differs between ranks."""
        return {"seen": list(self.seen)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def settings(operator_cls: type = Regression, *, size: int = 1, batch_size: int = 6, **options: Any) -> RankSettings:
    config = {BATCH_SIZE: batch_size // size, **options.pop("config", {})}
    defaults = {"num_workers": 1, "scheduler_step_freq": "batch"}
    return RankSettings(operator_cls=operator_cls, config=config, **{**defaults, **options})


def alone(operator_cls: type = Regression, **options: Any) -> Runner:
    return Runner(settings(operator_cls, **options), RankPlace(0, 0, 1))
