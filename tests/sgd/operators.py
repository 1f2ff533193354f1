"""Operators for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpc_det.sgd.operator.training_operator import TrainingOperator

Batch = tuple[torch.Tensor, torch.Tensor]


class Classifier(TrainingOperator):
    """Classifies 4 numbers into 3 classes; with config["scheduler"], a StepLR halves the learning rate."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if config.get("scheduler") else None
        back = self.register(models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss(), schedulers=scheduler)
        self.model, self.optimizer, self.criterion, *rest = back
        if rest:
            self.scheduler = rest[0]


def classifier(config: dict[str, Any] | None = None, **options: Any) -> Classifier:
    return Classifier(config or {}, 0, 0, **options)


def batches(*sizes: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator)) for n in sizes]
