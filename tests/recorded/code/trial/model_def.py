"""A trial of one layer, whose losses depend on all that a resume has to restore: shuffling, momentum, numpy's state."""

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext

PAUSED_AT = 5


class LineTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(nn.Linear(2, 1))
        rate = context.get_hparam("learning_rate")
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9))
        records = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(records, records.sum(dim=1, keepdim=True))

    def build_training_data_loader(self):
        return DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self):
        return DataLoader(self.data, batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch, epoch_idx, batch_idx):
        records, labels = batch
        if batch_idx == self.context.get_hparam("raise_at"):
            raise ValueError("the data of this trial is broken")
        self.wait_for_a_pause(batch_idx)
        noise = torch.from_numpy(np.random.normal(scale=0.1, size=records.shape)).float()
        loss = nn.functional.mse_loss(self.model(records + noise), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        records, labels = batch
        return {"error": nn.functional.mse_loss(self.model(records), labels)}

    def wait_for_a_pause(self, batch_idx):
        """In the first attempt of the experiment that is paused, wait for the request, and train slowly after it."""
        if self.context.get_hparam("is_paused") and os.environ["HPC_DET_NUMBER"] == "1" and batch_idx >= PAUSED_AT:
            while not Path(os.environ["HPC_DET_FOLDER"], "stop.json").exists():
                time.sleep(0.05)
            time.sleep(0.3)
