"""Trials in the shapes of Determined's examples and of its tests of the PyTorch API.

All of them learn one weight from records (1, 3), with the mean of the squared error as the loss. So the gradient is
-2 (3 - w), and with the learning rate 1/4 each step halves the distance of the weight from 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from hpc_det.errors import InvalidHP, UsageError
from hpc_det.pytorch import (
    DataLoader,
    LRScheduler,
    MetricReducer,
    PyTorchCallback,
    PyTorchTrial,
    PyTorchTrialContext,
    Reducer,
)
from tests.conformance.row import Row

HARNESS = "harness/tests/experiment/pytorch"
TRIALS = f"{HARNESS}/test_pytorch_trial.py"
RECORDS = 8
HALVED = (9.0, 2.25, 0.5625, 0.140625)
"""The losses of four batches, each with one step."""


@dataclass(frozen=True, kw_only=True)
class Example(Row):
    """A trial that is trained for batches of two records, of which four are an epoch, and its metrics."""

    trial: type[Slope]
    config: Mapping[str, Any] = field(default_factory=dict)
    batches: int = 4
    """How long it is trained."""
    losses: Sequence[float] = HALVED
    """The training metric `loss` of each batch."""
    validation: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the validation at the end."""
    raises: type[Exception] | None = None
    """The error that ends the training, if it does not end well."""


class Slope(PyTorchTrial):
    """The plainest trial."""

    clip: Any = None

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        self.model = context.wrap_model(model)
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.25))
        self.prepare()

    def prepare(self) -> None:
        """Wrap what this trial has besides the model and its optimizer."""

    def records(self) -> TensorDataset:
        return TensorDataset(torch.ones(RECORDS, 1), torch.full((RECORDS, 1), 3.0))

    def build_training_data_loader(self) -> Any:
        return DataLoader(self.records(), batch_size=self.context.get_per_slot_batch_size())

    def build_validation_data_loader(self) -> Any:
        return DataLoader(self.records(), batch_size=self.context.get_per_slot_batch_size())

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer, clip_grads=self.clip)
        return {"loss": loss}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {"error": self.loss(batch)}


class OnlyATensor(Slope):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return super().train_batch(batch, epoch_idx, batch_idx)["loss"]


class Pictures(Slope):
    """Returns tensors that are no metrics besides those that are."""

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {**super().train_batch(batch, epoch_idx, batch_idx), "picture": torch.zeros(2, 2)}

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        return {**super().evaluate_batch(batch), "picture": torch.zeros(2, 2)}


class ClippedByNorm(Slope):
    @staticmethod
    def clip(parameters: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 2.0)


class ClippedByValue(Slope):
    @staticmethod
    def clip(parameters: Any) -> None:
        torch.nn.utils.clip_grad_value_(parameters, 2.0)


class TwoModels(Slope):
    """Two models with an optimizer each, as a GAN has them."""

    def prepare(self) -> None:
        other = torch.nn.Linear(1, 1)
        self.other = self.context.wrap_model(other)
        self.second = self.context.wrap_optimizer(torch.optim.Adam(self.other.parameters()))

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        inputs, _ = batch
        fake = self.other(inputs).square().mean()
        self.context.backward(fake)
        self.context.step_optimizer(self.second)
        return {**super().train_batch(batch, epoch_idx, batch_idx), "fake": fake}


class DecayedEveryBatch(Slope):
    mode = LRScheduler.StepMode.STEP_EVERY_BATCH

    def prepare(self) -> None:
        decay = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.0)
        self.context.wrap_lr_scheduler(decay, self.mode)


class DecayedEveryEpoch(DecayedEveryBatch):
    mode = LRScheduler.StepMode.STEP_EVERY_EPOCH


class DecayedByHand(DecayedEveryBatch):
    mode = LRScheduler.StepMode.MANUAL_STEP


class TorchLoader(Slope):
    def build_training_data_loader(self) -> Any:
        return TorchDataLoader(self.records(), batch_size=2)


class TorchLoaderUnchecked(TorchLoader):
    def prepare(self) -> None:
        self.context.experimental.disable_dataset_reproducibility_checks()


class FullDataset(Slope):
    evaluate_batch = PyTorchTrial.evaluate_batch

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"error": sum(len(inputs) for inputs, _ in data_loader)}


class BothEvaluations(Slope):
    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        return {"error": 1.0}


class NoEvaluation(Slope):
    evaluate_batch = PyTorchTrial.evaluate_batch


class ReducedMetrics(Slope):
    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        count = float(len(batch[0]))
        return {"error": count, "most": count, "least": count, "total": count}

    def evaluation_reducer(self) -> Any:
        return {"error": Reducer.AVG, "most": Reducer.MAX, "least": Reducer.MIN, "total": Reducer.SUM}


class Total(MetricReducer):
    """The sum of all numbers that it is given."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        self.total += value

    def per_slot_reduce(self) -> float:
        return self.total

    def cross_slot_reduce(self, per_slot_metrics: list[float]) -> float:
        return sum(per_slot_metrics)


class OwnReducer(Slope):
    def prepare(self) -> None:
        self.reducer = self.context.wrap_reducer(Total(), name="total", for_training=False)

    def evaluate_batch(self, batch: Any) -> dict[str, Any]:
        self.reducer.update(float(len(batch[0])))
        return super().evaluate_batch(batch)


class FunctionReducer(OwnReducer):
    def prepare(self) -> None:
        self.reducer = self.context.wrap_reducer(sum, name="total", for_training=False)


class UnnamedNumber(Slope):
    def prepare(self) -> None:
        self.context.wrap_reducer(lambda updates: 1.0)


class NamedMap(Slope):
    def prepare(self) -> None:
        self.context.wrap_reducer(lambda updates: {"one": 1.0}, name="one")


class InvalidPoint(Slope):
    def prepare(self) -> None:
        raise InvalidHP("a later layer is narrower than the one before")


class StopsItself(Slope):
    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> Any:
        self.context.set_stop_requested(batch_idx == 1)
        return super().train_batch(batch, epoch_idx, batch_idx)


class Diary(PyTorchCallback):
    """Adds a file to every checkpoint."""

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "diary.txt").write_text("saved\n")


class Hooked(Slope):
    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"diary": Diary()}


def _optimizations(**settings: Any) -> dict[str, Any]:
    return {"optimizations": settings}


ROWS = [
    Example(case="a trial of one weight", follows=TRIALS, trial=Slope, validation={"error": 0.03515625}),
    Example(case="train_batch that returns a tensor", follows=f"{HARNESS}/test_metric_utils.py", trial=OnlyATensor),
    Example(case="tensors beside the metrics", follows=TRIALS, trial=Pictures, validation={"error": 0.03515625}),
    Example(
        case="gradients that are averaged over two batches",
        follows=TRIALS,
        trial=Slope,
        config=_optimizations(aggregation_frequency=2),
        losses=(9.0, 9.0, 2.25, 2.25),
    ),
    Example(
        case="gradients that are summed over two batches",
        follows=TRIALS,
        trial=Slope,
        config=_optimizations(aggregation_frequency=2, average_aggregated_gradients=False),
        losses=(9.0, 9.0, 0.0, 0.0),
    ),
    Example(
        case="gradients that are clipped by their norm",
        follows=TRIALS,
        trial=ClippedByNorm,
        losses=(9.0, 6.25, 4.0, 2.25),
    ),
    Example(
        case="gradients that are clipped by their value",
        follows=TRIALS,
        trial=ClippedByValue,
        losses=(9.0, 6.25, 4.0, 2.25),
    ),
    Example(case="two models with an optimizer each", follows="examples/gan/gan_mnist_pytorch", trial=TwoModels),
    Example(
        case="a learning rate that changes after each batch",
        follows="harness/determined/pytorch/_lr_scheduler.py",
        trial=DecayedEveryBatch,
        losses=(9.0, 2.25, 2.25, 2.25),
    ),
    Example(
        case="a learning rate that changes after each epoch",
        follows="harness/determined/pytorch/_lr_scheduler.py",
        trial=DecayedEveryEpoch,
        batches=6,
        losses=(*HALVED, 0.03515625, 0.03515625),
    ),
    Example(
        case="a learning rate scheduler that the trial does not step",
        follows="harness/determined/pytorch/_lr_scheduler.py",
        trial=DecayedByHand,
        batches=6,
        losses=(*HALVED, 0.03515625, 0.0087890625),
    ),
    Example(case="a loader of torch", follows=TRIALS, trial=TorchLoader, raises=UsageError),
    Example(case="a loader of torch without the checks", follows=TRIALS, trial=TorchLoaderUnchecked),
    Example(case="evaluate_full_dataset", follows=TRIALS, trial=FullDataset, validation={"error": RECORDS}),
    Example(
        case="evaluate_batch and evaluate_full_dataset",
        follows="harness/determined/pytorch/_pytorch_trial.py",
        trial=BothEvaluations,
        raises=UsageError,
    ),
    Example(
        case="no evaluation",
        follows="harness/determined/pytorch/_pytorch_trial.py",
        trial=NoEvaluation,
        raises=UsageError,
    ),
    Example(
        case="reducers of single metrics",
        follows=TRIALS,
        trial=ReducedMetrics,
        validation={"error": 2, "most": 2, "least": 2, "total": RECORDS},
    ),
    Example(
        case="a reducer that is a class",
        follows="examples/features/custom_reducers_mnist_pytorch",
        trial=OwnReducer,
        validation={"total": RECORDS},
    ),
    Example(
        case="a reducer that is a function",
        follows=f"{HARNESS}/test_reducer.py",
        trial=FunctionReducer,
        validation={"total": RECORDS},
    ),
    Example(case="an unnamed reducer of a number", follows=TRIALS, trial=UnnamedNumber, raises=UsageError),
    Example(case="a named reducer of a map", follows=TRIALS, trial=NamedMap, raises=UsageError),
    Example(
        case="hyperparameters that a trial calls invalid",
        follows="examples/features/hp_constraints_mnist_pytorch",
        trial=InvalidPoint,
        raises=InvalidHP,
    ),
    Example(
        case="a trial that stops itself",
        follows="harness/determined/pytorch/_pytorch_context.py",
        trial=StopsItself,
        losses=HALVED[:2],
        differs="after the batch in which it asks for it, not at the next report",
    ),
    Example(case="a callback that adds a file", follows="examples/features/checkpoint_hooks_pytorch", trial=Hooked),
]
