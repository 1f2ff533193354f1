"""Batch inference on all slots of a job: validation without training.

The records are the validation data, and `evaluate_batch` is the inference. The trial also needs an optimizer and
training data, which are dummies.

A validation does not resume in the middle. After a preemption or at a time limit it starts again at record 0, and
`evaluate_batch` receives records a second time. So each validation replaces its files (`on_validation_start`) instead
of appending to them. A trial that sends results to a database should write them under the number of the record, so that
the second result replaces the first. If a job's time is too short for all records, see `shards` in inference.yaml.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from hpc_det.pytorch import (
    DataLoader,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
    Reducer,
    load_trial_from_checkpoint_path,
)


class PredictionsFile(PyTorchCallback):
    """A file with the predictions of one rank, one line per record."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("number,digit\n")

    def write(self, numbers: list[int], digits: list[int]) -> None:
        with self.path.open("a") as file:
            file.writelines(f"{number},{digit}\n" for number, digit in zip(numbers, digits, strict=True))


class DigitsInference(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        trained = load_trial_from_checkpoint_path(context.get_hparam("checkpoint"))
        self.model = context.wrap_model(trained.model)
        context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.0))  # a dummy
        self.shard, self.shards = context.get_hparam("shard"), context.get_data_config()["shards"]
        folder = Path(context.get_data_config()["predictions"]).expanduser() / f"shard-{self.shard}"
        self.file = PredictionsFile(folder / f"rank-{context.distributed.get_rank()}.csv")

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"predictions": self.file}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(self.context.distributed.get_size())))  # dummies

    def train_batch(self, batch, epoch_idx, batch_idx):
        return {}

    def build_validation_data_loader(self) -> DataLoader:
        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        numbers = torch.arange(len(images))[self.shard :: self.shards]
        return DataLoader(TensorDataset(numbers, images[numbers]), batch_size=self.context.get_per_slot_batch_size())

    def evaluate_batch(self, batch):
        numbers, images = batch
        digits = self.model(images).argmax(dim=1)
        self.file.write(numbers.tolist(), digits.tolist())
        return {"records": len(numbers)}

    def evaluation_reducer(self):
        return Reducer.SUM
