# ruff: noqa: I001, UP006, UP007, UP035
# mypy: ignore-errors
"""Classify handwritten digits, written for Determined 0.19. This file does not refer to hpc_det."""

import logging
import os
from typing import Any, Dict, Sequence, Tuple, Union, cast

import data
import torch
from torch import nn

import determined as det
from determined.pytorch import (
    DataLoader,
    LRScheduler,
    MetricReducer,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
)

TorchData = Union[Dict[str, torch.Tensor], Sequence[torch.Tensor], torch.Tensor]


class ClassAccuracy(MetricReducer):
    """The accuracy of each digit, over all slots."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = [0] * 10
        self.seen = [0] * 10

    def update(self, labels: torch.Tensor, predictions: torch.Tensor) -> None:
        for label, prediction in zip(labels.tolist(), predictions.tolist()):  # noqa: B905
            self.right[label] += int(label == prediction)
            self.seen[label] += 1

    def per_slot_reduce(self) -> Any:
        return self.right, self.seen

    def cross_slot_reduce(self, per_slot_metrics: Any) -> Dict[str, float]:
        right, seen = (list(map(sum, zip(*counts))) for counts in zip(*per_slot_metrics))  # noqa: B905
        return {f"accuracy_{digit}": right[digit] / max(seen[digit], 1) for digit in range(10)}


class Diary(PyTorchCallback):
    def __init__(self) -> None:
        self.epochs = 0

    def on_training_epoch_end(self, epoch_idx: int) -> None:
        self.epochs += 1

    def on_validation_end(self, metrics: Dict[str, Any]) -> None:
        logging.info(f"after {self.epochs} epochs: validation_loss {metrics['validation_loss']}")

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        with open(os.path.join(checkpoint_dir, "diary.txt"), "w") as file:
            file.write(f"{self.epochs} epochs\n")

    def state_dict(self) -> Dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        self.epochs = state_dict["epochs"]


class DigitsTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)

        info = det.get_cluster_info()
        if info is not None:
            assert info.trial.hparams == self.context.get_hparams()
            logging.info(f"trial {info.trial.trial_id} of experiment {info.trial.experiment_id}")
        if self.context.get_hparam("n_filters1") > self.context.get_hparam("n_filters2"):
            raise det.InvalidHP("a later layer must not be narrower")

        # A folder for each rank, so that downloads do not overwrite each other.
        self.download_directory = f"data-rank{self.context.distributed.get_rank()}"
        self.data = data.download(self.download_directory, self.context.get_data_config()["every"])

        self.model = self.context.wrap_model(
            nn.Sequential(
                nn.Conv2d(1, self.context.get_hparam("n_filters1"), 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(self.context.get_hparam("n_filters1"), self.context.get_hparam("n_filters2"), 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(self.context.get_hparam("dropout")),
                nn.Flatten(),
                nn.Linear(9 * self.context.get_hparam("n_filters2"), 10),
            )
        )
        self.optimizer = self.context.wrap_optimizer(
            torch.optim.Adam(self.model.parameters(), lr=self.context.get_hparam("learning_rate"))
        )
        self.lr_sch = self.context.wrap_lr_scheduler(
            torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=4, gamma=0.5),
            step_mode=LRScheduler.StepMode.STEP_EVERY_EPOCH,
        )
        self.criterion = nn.CrossEntropyLoss()
        self.class_accuracy = self.context.wrap_reducer(ClassAccuracy(), for_training=False)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            data.dataset(self.data, train=True), batch_size=self.context.get_per_slot_batch_size(), shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(data.dataset(self.data, train=False), batch_size=self.context.get_per_slot_batch_size())

    def build_callbacks(self) -> Dict[str, PyTorchCallback]:
        return {"diary": Diary()}

    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Dict[str, torch.Tensor]:
        images, labels = cast(Tuple[torch.Tensor, torch.Tensor], batch)
        loss = self.criterion(self.model(images), labels)
        self.context.backward(loss)
        self.context.step_optimizer(
            self.optimizer, clip_grads=lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0)
        )
        return {"loss": loss}

    def evaluate_batch(self, batch: TorchData) -> Dict[str, Any]:
        images, labels = cast(Tuple[torch.Tensor, torch.Tensor], batch)
        output = self.model(images)
        predictions = output.argmax(dim=1)
        self.class_accuracy.update(labels, predictions)
        accuracy = predictions.eq(labels).sum().item() / len(labels)
        return {"validation_loss": self.criterion(output, labels).item(), "accuracy": accuracy}
