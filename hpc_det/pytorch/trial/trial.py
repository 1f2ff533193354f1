"""What a user implements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hpc_det.distributed.metrics import Reducer
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import DataLoader
from hpc_det.pytorch.strategies.pytorch_strategy import PyTorchStrategy
from hpc_det.pytorch.strategies.strategy import Strategy
from hpc_det.pytorch.trial.callback import PyTorchCallback
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial_context import TrialContext


class Trial:
    """What all kinds of trials have in common."""

    strategy_class: ClassVar[type[Strategy]]
    """How the loop trains this kind."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def build_training_data_loader(self) -> Any:
        raise NotImplementedError

    def build_validation_data_loader(self) -> Any:
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: Iterable[Any]) -> dict[str, Any]:
        """All validation data at once, on rank 0 alone, while the other ranks wait. Returns the metrics."""
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """How a metric of `evaluate_batch` becomes one number; a dict names every metric."""
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {}


class PyTorchTrial(Trial):
    """Subclass this; wrap models, optimizers and schedulers in `__init__`.

    `train_batch`, both loaders and one of `evaluate_batch` and `evaluate_full_dataset` are required.
    """

    strategy_class = PyTorchStrategy

    def __init__(self, context: PyTorchTrialContext) -> None:
        self.context = context

    def build_training_data_loader(self) -> DataLoader | Iterable[Any]:
        """hpc_det's DataLoader; any other after `context.experimental.disable_dataset_reproducibility_checks()`."""
        raise NotImplementedError

    def build_validation_data_loader(self) -> DataLoader | Iterable[Any]:
        raise NotImplementedError

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """One batch of this rank, on its device. Calls `context.backward` and `context.step_optimizer`.

        `batch_idx` counts from the start of the trial. Returns scalars by name; a bare tensor is the loss.
        """
        raise NotImplementedError

    def evaluate_batch(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """(batch) or (batch, batch_idx): one batch of this rank's share of the validation data, counted from 0.

        Without gradients, models in eval mode. Returns scalars by name.
        """
        raise NotImplementedError

    def get_batch_length(self, batch: Any) -> int:
        """The number of records in a batch: the first dimension of the first tensor or array in nested dicts, lists and
        tuples (upstream's rule). Override it for batches without any; it raises UsageError for them.
        """
        first = batch
        while not isinstance(first, torch.Tensor):
            if isinstance(first, (list, tuple)) and first:
                first = first[0]
            elif isinstance(first, Mapping) and first:
                first = next(iter(first.values()))
            else:
                break
        if isinstance(first, (torch.Tensor, np.ndarray)) and first.ndim:
            return int(first.shape[0])
        kind = type(first).__name__
        raise UsageError(f"get_batch_length: {kind} has no length that says how many records; override it")


@dataclass(frozen=True)
class BuiltTrial:
    """A trial that was built in this process: the user's object, its context, and how the loop trains this kind."""

    trial: Trial
    context: TrialContext
    strategy: Strategy


REQUIRED = ("train_batch", "build_training_data_loader", "build_validation_data_loader")
EVALUATIONS = ("evaluate_batch", "evaluate_full_dataset")


def interface_problems(trial_class: type[Trial]) -> list[str]:
    """What keeps a class from being a trial: a sentence each."""
    missing = [name for name in REQUIRED if not implements(trial_class, name)]
    problems = [f"does not implement {', '.join(missing)}"] if missing else []
    evaluations = [name for name in EVALUATIONS if implements(trial_class, name)]
    if len(evaluations) != 1:
        how_many = "both" if evaluations else "neither"
        problems.append(f"implements {how_many} of {' and '.join(EVALUATIONS)}; implement one of them")
    return problems


def implements(trial_class: type[Trial], name: str) -> bool:
    """Whether the user has, beside the kind of trial that it is."""
    return getattr(trial_class, name) is not getattr(kind_of(trial_class), name)


def kind_of(trial_class: type[Trial]) -> type[Trial]:
    """PyTorchTrial or DeepSpeedTrial."""
    return next(base for base in trial_class.__mro__ if "strategy_class" in vars(base))
