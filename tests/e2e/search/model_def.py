import time

import torch
from torch.utils.data import TensorDataset

from hpc_det.pytorch import DataLoader, PyTorchTrial


class Known(PyTorchTrial):
    """A trial whose metric is a known function, independent of its training: best at x = 0.3, and better after more
    batches.
    """

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(torch.nn.Linear(1, 1))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.01))
        self.batches = 0

    def train_batch(self, batch, epoch_idx, batch_idx):
        time.sleep(self.context.get_hparam("batch_s"))
        loss = self.model(batch[0]).square().mean()
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.batches = batch_idx + 1
        return {"loss": loss}

    def evaluate_batch(self, batch):
        return {"distance": abs(self.context.get_hparam("x") - 0.3) + 1 / (self.batches + 1)}

    def build_training_data_loader(self):
        return DataLoader(TensorDataset(torch.randn(64, 1)), batch_size=4)

    def build_validation_data_loader(self):
        return DataLoader(TensorDataset(torch.randn(4, 1)), batch_size=4)
