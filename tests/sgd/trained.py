"""Operators that tests train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.sgd import BATCH_SIZE, TorchTrainer, TrainingOperator


class Linear(TrainingOperator):
    """y = 2 x + 5, with dropout so that generators matter, and momentum so that the optimizer's state matters."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config.get("seed", 0))
        x = torch.linspace(-1, 1, config.get("samples", 64)).unsqueeze(1)
        data = TensorDataset(x, 2 * x + 5)
        batch_size = config.get(BATCH_SIZE, 4)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.05), momentum=0.9)
        self.model, self.optimizer, self.criterion, *schedulers = self.register(
            models=model,
            optimizers=optimizer,
            criterion=nn.MSELoss(),
            schedulers=[StepLR(optimizer, step_size=100), ReduceLROnPlateau(optimizer)]
            if self.scheduler_step_freq
            else None,
        )
        if schedulers:
            self.scheduler = schedulers[0][0]
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        self.register_data(train_loader=loader, validation_loader=DataLoader(data, batch_size=batch_size))
        self.fatal = config.get("fatal")

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        """`fatal`: (rank, global step, file): kill that rank before that step, once."""
        if self.fatal:
            rank, step, once = self.fatal
            if self.world_rank == rank and batch_info["global_step"] == step and not os.path.exists(once):
                open(once, "w").close()
                os.kill(os.getpid(), 9)
        return super().train_batch(batch, batch_info)

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> dict[str, Any]:
        features, target = batch
        loss = self.criterion(self.model(features), target)
        return {"val_loss": loss.item(), "num_samples": len(target)}


def weights(its: TorchTrainer) -> dict[str, torch.Tensor]:
    """Return a copy of the weights of the only model, by name."""
    state = its.state_dict()["models"][0]
    return {name: value.clone() for name, value in state.items()}
