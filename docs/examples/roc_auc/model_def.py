"""Custom reducers, for malignant and benign tumours: 569 records of 30 measurements, shipped with scikit-learn.

The area under the ROC curve compares every malignant record with every benign one. The mean of the areas of batches is
a different number, so the area is computed from the records of all batches and ranks.
"""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpc_det.pytorch import DataLoader, MetricReducer, PyTorchTrial, PyTorchTrialContext


def tumours(*, training: bool) -> Dataset:
    """Return pairs (30 measurements, 1.0 for malignant). Every fifth record is for validation."""
    data = load_breast_cancer()
    measurements = torch.tensor(data.data, dtype=torch.float32)
    malignant = torch.tensor(data.target == 0, dtype=torch.float32)
    for_training = torch.arange(len(malignant)) % 5 != 0
    known = measurements[for_training]
    measurements = (measurements - known.mean(dim=0)) / known.std(dim=0)
    chosen = for_training == training
    return TensorDataset(measurements[chosen], malignant[chosen])


class RocAuc(MetricReducer):
    """A reducer as a class: each rank collects records, rank 0 computes the metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.scores: list[float] = []
        self.labels: list[float] = []

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        self.scores += scores.tolist()
        self.labels += labels.tolist()

    def per_slot_reduce(self):
        return self.scores, self.labels

    def cross_slot_reduce(self, per_slot_metrics):
        scores = [score for scores, _ in per_slot_metrics for score in scores]
        labels = [label for _, labels in per_slot_metrics for label in labels]
        return roc_auc_score(labels, scores)


def rates(counts: list[torch.Tensor]) -> dict[str, float]:
    """A reducer as a function of the updates of all batches and ranks. Without a name, it returns a dict of metrics."""
    true_positive, false_negative, true_negative, false_positive = torch.stack(counts).sum(dim=0)
    return {
        "sensitivity": true_positive / (true_positive + false_negative),
        "specificity": true_negative / (true_negative + false_positive),
    }


def counts(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the numbers of true positives, false negatives, true negatives and false positives."""
    said, is_so = scores > 0, labels == 1
    return torch.stack([(said & is_so).sum(), (~said & is_so).sum(), (~said & ~is_so).sum(), (said & ~is_so).sum()])


class TumourTrial(PyTorchTrial):
    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        width = context.get_hparam("width")
        model = nn.Sequential(nn.Linear(30, width), nn.ReLU(), nn.Linear(width, 1), nn.Flatten(0))
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(
            torch.optim.AdamW(model.parameters(), lr=context.get_hparam("learning_rate"))
        )
        self.criterion = nn.BCEWithLogitsLoss()
        self.roc_auc = context.wrap_reducer(RocAuc(), "roc_auc", for_training=False)
        self.rates = context.wrap_reducer(rates)

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(tumours(training=True), batch_size=self.context.get_per_slot_batch_size(), shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(tumours(training=False), batch_size=self.context.get_per_slot_batch_size())

    def train_batch(self, batch, epoch_idx, batch_idx):
        measurements, malignant = batch
        scores = self.model(measurements)
        loss = self.criterion(scores, malignant)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        self.rates.update(counts(scores, malignant))
        return {"loss": loss}

    def evaluate_batch(self, batch):
        measurements, malignant = batch
        scores = self.model(measurements)
        self.roc_auc.update(scores, malignant)
        self.rates.update(counts(scores, malignant))
        return {"validation_loss": self.criterion(scores, malignant)}
