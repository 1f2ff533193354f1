"""A trial that sleeps in loading and training as its hyperparameters say."""

import time

import torch
from torch.utils.data import TensorDataset, default_collate

from hpc_det.pytorch import DataLoader, PyTorchTrial, PyTorchTrialContext


class TimedTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(4, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.01))

    def build_training_data_loader(self) -> DataLoader:
        return self._loader(self.context.get_hparam("load_s"))

    def build_validation_data_loader(self) -> DataLoader:
        return self._loader(0)

    def _loader(self, load_s: float) -> DataLoader:
        def load(records):
            time.sleep(load_s)
            return default_collate(records)

        data = TensorDataset(torch.zeros(self.context.get_hparam("records"), 4))
        return DataLoader(data, batch_size=self.context.get_per_slot_batch_size(), collate_fn=load)

    def train_batch(self, batch, epoch_idx, batch_idx):
        (records,) = batch
        if len(records) > self.context.get_hparam("fits"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        time.sleep(self.context.get_hparam("batch_s"))
        loss = self.model(records).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        raise AssertionError("a measurement validates nothing")
