"""A DeepSpeed engine on real handwritten digits: 1797 images of 8 x 8, shipped inside scikit-learn.

The trial defines the model. ds_config.json configures the optimizer, the batch sizes and ZeRO; hyperparameters of the
experiment override it.
"""

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpc_det.pytorch import DataLoader
from hpc_det.pytorch.deepspeed import DeepSpeedTrial, DeepSpeedTrialContext, get_ds_config_from_hparams


def digits(*, training: bool) -> Dataset:
    """Return pairs (64 brightnesses in 0..1, digit). Every fifth image is for validation."""
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    chosen = (torch.arange(len(labels)) % 5 != 0) == training
    return TensorDataset(images[chosen], labels[chosen])


class DigitsTrial(DeepSpeedTrial):
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")
        model = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Dropout(context.get_hparam("dropout")),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=get_ds_config_from_hparams(context.get_hparams()),
        )
        self.engine = context.wrap_model_engine(engine)
        self.criterion = nn.CrossEntropyLoss()

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(digits(training=True), batch_size=self.engine.train_micro_batch_size_per_gpu(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        # 60 divides the 360 images, so the mean over batches, which have equal weight, is the mean over images
        return DataLoader(digits(training=False), batch_size=60)

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        images, labels = self.context.to_device(next(dataloader_iter))
        loss = self.criterion(self.engine(images), labels)
        self.engine.backward(loss)
        self.engine.step()  # updates weights at every second call (gradient_accumulation_steps)
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        images, labels = self.context.to_device(next(dataloader_iter))
        output = self.engine(images)
        accuracy = (output.argmax(dim=1) == labels).float().mean()
        return {"validation_loss": self.criterion(output, labels), "accuracy": accuracy}
