"""The classes that users subclass: the common base class of trials, and PyTorchTrial."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hpc_det.distributed.metrics import Reducer
from hpc_det.pytorch.data import DataLoader
from hpc_det.pytorch.strategies.device import data_length
from hpc_det.pytorch.strategies.pytorch_strategy import PyTorchStrategy
from hpc_det.pytorch.strategies.strategy import Strategy
from hpc_det.pytorch.trial.callback import PyTorchCallback
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial_context import TrialContext


class Trial:
    """The common base class of PyTorchTrial and DeepSpeedTrial. Subclass one of these, not this class."""

    strategy_class: ClassVar[type[Strategy]]
    """The class that runs this kind of trial for the training loop."""

    def __init__(self, context: Any) -> None:
        """Store the context. Subclasses build and wrap here what is trained."""
        self.context = context

    def build_training_data_loader(self) -> Any:
        """Return the loader of the training data. Must be overridden."""
        raise NotImplementedError

    def build_validation_data_loader(self) -> Any:
        """Return the loader of the validation data. Must be overridden."""
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: Iterable[Any]) -> dict[str, Any]:
        """Return the validation metrics, by name, of the full validation data.

        Implement either this method or `evaluate_batch`. It runs on rank 0 alone while the other ranks wait, without
        gradients and with models in eval mode.

        Args:
            data_loader: All validation batches, not sharded over the ranks and not moved to a device: move them with
                `context.to_device`.
        """
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | dict[str, Reducer]:
        """Return how the values of a metric that `evaluate_batch` returns are reduced over batches and ranks.

        The default, `Reducer.AVG`, is the mean in which each batch has the same weight. Return a dict with one entry
        per metric to reduce metrics differently.
        """
        return Reducer.AVG

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return the callbacks by name; the default is none. Called on every rank, once per process.

        Checkpoints store the state of a callback under its name.
        """
        return {}


class PyTorchTrial(Trial):
    """The base class of trials that train with plain PyTorch. Each rank creates one instance.

    Subclass it, wrap models, optimizers and schedulers in `__init__`, and implement `train_batch`, both loaders and
    exactly one of `evaluate_batch` and `evaluate_full_dataset`.
    """

    strategy_class = PyTorchStrategy

    def __init__(self, context: PyTorchTrialContext) -> None:
        """Build models, optimizers and schedulers and wrap them, in the same way on every rank.

        Random generators are seeded with the trial's seed before this call, the same on all ranks.

        Args:
            context: This rank's context. The default implementation stores it as `self.context`.
        """
        self.context = context

    def build_training_data_loader(self) -> DataLoader | Iterable[Any]:
        """Return the loader of the training data. Called on every rank, once per process.

        Return an `hpc_det.pytorch.DataLoader` with `batch_size=context.get_per_slot_batch_size()` over the full
        dataset; the training loop shards, shuffles and repeats it. Another loader is accepted after
        `context.experimental.disable_dataset_reproducibility_checks()`.
        """
        raise NotImplementedError

    def build_validation_data_loader(self) -> DataLoader | Iterable[Any]:
        """Return the loader of the validation data. Called on every rank, once per process.

        The same loaders are accepted as in `build_training_data_loader`; the batch size may be another one. In a
        validation each record is evaluated once, whatever the number of ranks. Another loader than hpc_det's is not
        sharded: each rank evaluates all of its batches.
        """
        raise NotImplementedError

    def train_batch(self, batch: Any, epoch_idx: int, batch_idx: int) -> torch.Tensor | dict[str, Any]:
        """Train one batch of this rank, with `context.backward` and `context.step_optimizer`.

        Args:
            batch: This rank's share of a batch, on the rank's device, in the structure that the loader's collate
                function gives it.
            epoch_idx: Number of the epoch, from 0.
            batch_idx: Number of the batch, from 0 at the start of the trial; a resume continues the count.

        Returns:
            The loss as a tensor, or a dict of metrics by name, the same names for each batch and rank. Metrics are
            numbers or tensors of one element; tensors may stay on the GPU and need no `detach()`. Other values are
            reported as null.
        """
        raise NotImplementedError

    def evaluate_batch(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return the metrics, by name, of one batch of this rank's share of the validation data.

        Declare it as `evaluate_batch(self, batch)` or `evaluate_batch(self, batch, batch_idx)`; `batch_idx` counts this
        rank's batches of the validation from 0. It runs without gradients, with models in eval mode. Metrics are
        numbers or tensors of one element, with the same names for each batch and rank; `evaluation_reducer` reduces
        them. Larger tensors beside them, such as predictions, reach `on_validation_epoch_end` of callbacks and are
        reported as null.
        """
        raise NotImplementedError

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of records in a batch, which reports use for samples per second.

        It is the first dimension of the first tensor or array in nested dicts, lists and tuples (Determined's rule).
        Override this method if batches contain neither.

        Args:
            batch: A batch as `train_batch` receives it.

        Raises:
            UsageError: The first element is not a tensor or array with at least one dimension.
        """
        return data_length(batch)


@dataclass(frozen=True)
class BuiltTrial:
    """A trial that was built in this process: the user's object, its context, and its strategy."""

    trial: Trial
    context: TrialContext
    strategy: Strategy


REQUIRED = ("train_batch", "build_training_data_loader", "build_validation_data_loader")
EVALUATIONS = ("evaluate_batch", "evaluate_full_dataset")


def interface_problems(trial_class: type[Trial]) -> list[str]:
    """Return the reasons why a class cannot be trained, each as text that continues the class name; [] if none."""
    missing = [name for name in REQUIRED if not implements(trial_class, name)]
    problems = [f"does not implement {', '.join(missing)}"] if missing else []
    evaluations = [name for name in EVALUATIONS if implements(trial_class, name)]
    if len(evaluations) != 1:
        how_many = "both" if evaluations else "neither"
        problems.append(f"implements {how_many} of {' and '.join(EVALUATIONS)}; implement one of them")
    return problems


def implements(trial_class: type[Trial], name: str) -> bool:
    """Return whether the user's class overrides the method `name` of PyTorchTrial or DeepSpeedTrial."""
    return getattr(trial_class, name) is not getattr(kind_of(trial_class), name)


def kind_of(trial_class: type[Trial]) -> type[Trial]:
    """Return the base class of a trial, PyTorchTrial or DeepSpeedTrial: the first class with its own strategy_class."""
    return next(base for base in trial_class.__mro__ if "strategy_class" in vars(base))
