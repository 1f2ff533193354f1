"""A trial with state that a resume could lose on a GPU: random draws, optimizer state and scaled losses."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

RECORDS = 44
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


class Images(PyTorchTrial):
    """44 images in batches of 8: six batches an epoch, the last one short."""

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        if os.environ.get("CUBLAS_WORKSPACE_CONFIG"):  # otherwise torch refuses matrix products
            torch.use_deterministic_algorithms(True)
        if dtype := TYPES.get(context.get_hparam("amp")):
            context.experimental.use_amp(dtype)
        layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(288, 4))
        self.model = context.wrap_model(nn.Sequential(*layers))
        self.optimizer = context.wrap_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.01, fused=True))

    def build_training_data_loader(self) -> DataLoader:
        return self.loader(RECORDS, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return self.loader(12)

    def loader(self, records: int, shuffle: bool = False) -> DataLoader:
        generator = torch.Generator().manual_seed(records)
        images = torch.randn(records, 3, 8, 8, generator=generator)
        labels = images[:, 0, 0, :4].argmax(dim=1)
        workers = self.context.get_hparam("workers")
        return DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=shuffle, num_workers=workers)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        images, labels = batch
        noise = 0.1 * torch.rand(images.shape, device=self.context.device)
        loss = nn.functional.cross_entropy(self.model(images + noise), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self._obey(batch_idx)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        return {"loss": loss, "noise": torch.rand((), device=self.context.device)}

    def _obey(self, batch_idx: int) -> None:
        hparams = self.context.get_hparams()
        time.sleep(hparams.get("batch_s", 0))  # lets a test act in the middle of a run
        if hparams.get("too_large_at") == batch_idx:
            torch.empty(2**50, dtype=torch.uint8, device=self.context.device)
