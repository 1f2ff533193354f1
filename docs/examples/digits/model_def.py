"""A small convolutional network on real handwritten digits: the 1797 images of 8 x 8 in digits.npz (see README.md)."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpc_det.pytorch import DataLoader, LRScheduler, PyTorchTrial, PyTorchTrialContext


def digits(*, training: bool) -> Dataset:
    """Return pairs (image 1 x 8 x 8 in 0..1, digit). Every fifth image is for validation."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images = torch.from_numpy(file["images"]).float().unsqueeze(1) / 16
        labels = torch.from_numpy(file["labels"]).long()
    chosen = (torch.arange(len(labels)) % 5 != 0) == training
    return TensorDataset(images[chosen], labels[chosen])


class DigitsTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(context.get_hparam("dropout")),
            nn.Linear(32 * 4 * 4, 10),
        )
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(
            torch.optim.SGD(model.parameters(), lr=context.get_hparam("learning_rate"), momentum=0.9)
        )
        context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.95),
            LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        self.criterion = nn.CrossEntropyLoss()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(digits(training=True), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        # 60 divides the 360 images, so the mean over batches, which have equal weight, is the mean over images
        return DataLoader(digits(training=False), batch_size=60)

    def train_batch(self, batch, epoch_idx, batch_idx):
        images, labels = batch
        loss = self.criterion(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        images, labels = batch
        output = self.model(images)
        accuracy = (output.argmax(dim=1) == labels).float().mean()
        return {"validation_loss": self.criterion(output, labels), "accuracy": accuracy}
