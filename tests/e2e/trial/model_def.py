"""A trial with all the state that a resume can get wrong: dropout, momentum, a schedule, a shuffle, numpy's RNG."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext
from hpc_det.store.attempt import read_stop

RECORDS = 250


class Backwards(nn.Module):
    """Registers its layers in another order than it uses them, so DDP's buckets change after its first iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 4)
        self.first = nn.Linear(16, 32)
        self.dropout = nn.Dropout(0.2)

    def forward(self, records: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.tanh(self.first(records))))


class StoryTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(Backwards())
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        context.wrap_lr_scheduler(schedule, LRScheduler.StepMode.STEP_EVERY_EPOCH)
        generator = torch.Generator().manual_seed(1)
        records = torch.randn(RECORDS, 16, generator=generator)
        self.data = TensorDataset(records, records[:, :4].argmax(dim=1))

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch, epoch_idx, batch_idx):
        records, labels = batch
        noise = torch.from_numpy(np.random.normal(scale=0.1, size=records.shape)).float()
        loss = nn.functional.cross_entropy(self.model(records + noise), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        time.sleep(self.context.get_hparam("batch_s"))
        self._misbehave(batch_idx)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        records, labels = batch
        return {"accuracy": (self.model(records).argmax(dim=1) == labels).float().mean()}

    def _misbehave(self, batch_idx: int) -> None:
        """Let the last rank fail or wait as the hyperparameters say."""
        if self.context.distributed.get_rank() < self.context.distributed.get_size() - 1:
            return
        if self.context.get_hparam("raise_at") == batch_idx:
            raise RuntimeError("the sky has fallen")
        if self.context.get_hparam("die_at") == batch_idx:
            os.abort()
        if 0 <= self.context.get_hparam("waits_at") <= batch_idx and os.environ["HPC_DET_NUMBER"] == "1":
            self._wait()

    def _wait(self) -> None:
        """Wait until the rank is asked to stop, or a test kills or stops it, and a little longer: ranks still have to
        agree on the stop.
        """
        while not read_stop(Path(os.environ["HPC_DET_FOLDER"], "stop.json"), 1):
            time.sleep(0.05)
        time.sleep(0.5)
