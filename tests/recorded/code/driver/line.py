"""The operator of the TorchTrainer in driver.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_det.sgd import TrainingOperator


class LineOperator(TrainingOperator):
    def setup(self, config):
        torch.manual_seed(0)
        x = torch.randn(40, 1)
        points = TensorDataset(x, 2 * x + 5)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(points, 8, shuffle=True), validation_loader=DataLoader(points, 8))
