"""TrainingOperator: the class in which users define models, data and training steps. Each rank has one instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hpc_det.errors import UsageError
from hpc_det.pytorch.strategies.ddp import DataParallel, share_buffers
from hpc_det.sgd.operator.base import BaseOperator
from hpc_det.sgd.operator.creators import Creator, Creators, CreatorSetup
from hpc_det.sgd.operator.meters import AverageMeterCollection, NoBar, bar_over
from hpc_det.sgd.operator.options import EPOCH_IDX, NUM_SAMPLES, NUM_STEPS, NotAvailable, NotSet

Metrics = dict[str, Any]
OnBatch = Callable[[Any, Mapping[str, Any]], Metrics]
"""A function that trains or evaluates a batch: it takes the batch and its `batch_info`, and returns the metrics."""


class TrainingOperator(BaseOperator):
    """The user's training code on one rank. Derive a class from it, and register models and data in `setup`.

    The default loops train `self.model` with `self.optimizer` on the loss `self.criterion`, and step `self.scheduler`;
    set these attributes in `setup` from what `register` returns. Override `train_batch` and `validate_batch`, or
    `train_epoch` and `validate`, for any other training.

    TorchTrainer creates the operators; see BaseOperator for the constructor's arguments.
    """

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> Metrics:
        """Train on all batches of `iterator` and step `self.scheduler` as `scheduler_step_freq` requires.

        An override may omit any argument but `iterator`: it receives only those that it declares.

        Args:
            iterator: Batches of the training loader, as many as this call of `TorchTrainer.train` trains.
            info: The `info` of `TorchTrainer.train`, with `__num_steps__`, `__use_fp16__` and `epoch_idx` added.
            num_steps: Number of batches, or None; used only for the progress bar if `info` lacks `__num_steps__`.
            epoch_idx: Number of completed passes over the training data; used only for the progress bar if `info`
                lacks `epoch_idx`.

        Returns:
            `batch_count`, `num_samples`, and for each metric m of `train_batch` its mean over samples, `m`, and its
            value for the last batch, `last_m`. An override may return any dict.

        Raises:
            NotSet: A RuntimeError; `self.model`, `self.optimizer`, `self.criterion` or `self.scheduler` is needed and
                not set.
            UsageError: A batch does not have the form that the default `train_batch` takes, or an overridden
                `train_batch` returned something other than a dict.
        """
        info = info or {}
        scheduler = self._scheduler_to_step()
        # `_train` instead of the default `train_batch`, which converts metrics to numbers and so waits for the GPU in
        # each batch; `_train` returns tensors.
        train_batch: OnBatch = self._train if self._has_default("train_batch") else self.train_batch
        meters = AverageMeterCollection()
        self._switch(training=True)
        # Keys of `info` win: the runner sets them. The keyword arguments exist because RaySGD 1.8 has them.
        with self._bar(iterator, {NUM_STEPS: num_steps, EPOCH_IDX: epoch_idx, **info}) as bar:
            for batch_idx, batch in enumerate(iterator):
                metrics = train_batch(batch, {"batch_idx": batch_idx, "global_step": self.global_step, **info})
                meters.update(metrics)
                if scheduler and self._scheduler_step_freq == "batch":
                    scheduler.step()
                self.global_step += 1
                bar.advance(metrics)
        if scheduler and self._scheduler_step_freq == "epoch":
            scheduler.step()
        return meters.summary()

    def train_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Metrics:
        """Train on one batch: forward pass, loss, backward pass, optimizer step.

        Args:
            batch: A tuple or list `(*features, target)`; the model is called with the features.
            batch_info: `batch_idx` (number of the batch in this call, from 0), `global_step`, and all keys of `info`.

        Returns:
            `train_loss` and `num_samples`. An override returns a dict of numbers or one-element tensors; its
            `num_samples` is the weight of the batch (1 if missing). Return tensors unconverted: converting them waits
            for the GPU.

        Raises:
            NotSet: A RuntimeError; `self.model`, `self.optimizer` or `self.criterion` is not set.
            UsageError: `batch` is not a tuple or list of at least two entries.
        """
        return _as_numbers(self._train(batch, batch_info))

    def validate(self, val_iterator: Iterable[Any], info: Mapping[str, Any] | None = None) -> Metrics:
        """Evaluate all batches of `val_iterator` in eval mode and without gradients.

        Args:
            val_iterator: Batches of the validation loader.
            info: The `info` of `TorchTrainer.validate`, with `__num_steps__`, `__use_fp16__` and `epoch_idx` added.

        Returns:
            `batch_count`, `num_samples`, and for each metric m of `validate_batch` its mean over samples, `m`, and its
            value for the last batch, `last_m`. An override may return any dict.

        Raises:
            NotSet: A RuntimeError; `self.model` or `self.criterion` is needed and not set.
            UsageError: A batch does not have the form that the default `validate_batch` takes, or an overridden
                `validate_batch` returned something other than a dict.
        """
        info = info or {}
        validate_batch: OnBatch = self._evaluate if self._has_default("validate_batch") else self.validate_batch
        meters = AverageMeterCollection()
        self._switch(training=False)
        with torch.no_grad(), self._evaluating():
            for batch_idx, batch in enumerate(val_iterator):
                meters.update(validate_batch(batch, {"batch_idx": batch_idx, **info}))
        return meters.summary()

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Metrics:
        """Evaluate one batch.

        Args:
            batch: A tuple or list `(*features, target)`; the model is called with the features.
            batch_info: `batch_idx` (number of the batch in this call, from 0) and all keys of `info`.

        Returns:
            `val_loss`, `val_accuracy` and `num_samples`. The accuracy is the fraction of targets that equal the argmax
            of the output over dimension 1; NaN if target and argmax have different shapes, as in a regression.

        Raises:
            NotSet: A RuntimeError; `self.model` or `self.criterion` is not set.
            UsageError: `batch` is not a tuple or list of at least two entries.
        """
        return _as_numbers(self._evaluate(batch, batch_info))

    # --- the default steps; their metrics stay tensors, because reading a number waits for the GPU

    def _train(self, batch: Any, batch_info: Mapping[str, Any]) -> Metrics:
        optimizer = self._own("optimizer")
        *features, target = self._on_device(batch)
        with self.timers.record("fwd"):
            loss, _ = self._forward(features, target)
        with self.timers.record("grad"):
            optimizer.zero_grad()
            self.backward(loss)
        with self.timers.record("apply"):
            self.step(optimizer)
        return {"train_loss": loss, NUM_SAMPLES: len(features[0])}

    def _evaluate(self, batch: Any, batch_info: Mapping[str, Any]) -> Metrics:
        *features, target = self._on_device(batch)
        with self.timers.record("eval_fwd"):
            loss, output = self._forward(features, target)
        return {"val_loss": loss, "val_accuracy": _accuracy(output, target), NUM_SAMPLES: len(features[0])}

    def _forward(self, features: list[Any], target: Any) -> tuple[torch.Tensor, Any]:
        """Return the loss and the output of the model."""
        model, criterion = self._own("model"), self._own("criterion")
        with self.autocast():
            output = model(*features)
            return criterion(output, target), output

    def _on_device(self, batch: Any) -> Any:
        """Return the batch on the rank's device. Raises UsageError if it is not `(*features, target)`."""
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise UsageError(
                f"a batch is {type(batch).__name__}, but the default train_batch and validate_batch take a tuple or "
                f"list (*features, target); override them for this data"
            )
        return self._to_device(batch) if self._to_device else batch

    # --- used by the default loops

    def _has_default(self, name: str) -> bool:
        """Return whether the user's class does not override the method."""
        # getattr of the instance: setup() may also have assigned a function to the name.
        return getattr(getattr(self, name), "__func__", None) is getattr(TrainingOperator, name)

    def _own(self, name: str) -> Any:
        """Return the attribute that `setup` has set. Raises NotSet if it is missing or None."""
        value = getattr(self, name, None)
        if value is None:
            raise NotSet(
                f"{type(self).__name__}: self.{name} is not set, but the default loops need it; set it in setup, "
                f"as in self.model, self.optimizer, ... = self.register(...), or override train_batch or train_epoch"
            )
        return value

    def _scheduler_to_step(self) -> Any:
        """Return the scheduler that the default loop steps, or None.

        Raises NotSet if schedulers are registered and `self.scheduler` is not set.
        """
        if self._scheduler_step_freq not in ("batch", "epoch"):
            return None
        return self._own("scheduler") if self._schedulers else getattr(self, "scheduler", None)

    def _switch(self, *, training: bool) -> None:
        """Set train or eval mode of `self.model`, or of all registered models if `self.model` is not set."""
        model = getattr(self, "model", None)
        # Operators that override `train_batch` need not set self.model: a GAN, for example, trains several models.
        for switched in self._wrapped if model is None else [model]:
            switched.train(training)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Disable DDP's communication in forward passes, so that ranks may have different numbers of batches.

        Collective: it first copies the buffers of rank 0 to all ranks. A nested call does nothing.
        """
        # DDP broadcasts the buffers of rank 0 in the first forward pass, and would wait for a rank without batches.
        models = [model for model in self._wrapped if isinstance(model, DataParallel) and not model.alone]
        share_buffers(models)
        for model in models:
            model.alone = True
        try:
            yield
        finally:
            for model in models:
                model.alone = False

    def _bar(self, iterator: Iterable[Any], info: Mapping[str, Any]) -> NoBar:
        """Return a progress bar on rank 0 with `use_tqdm`, else one that shows nothing."""
        return bar_over(iterator, info) if self._use_tqdm and self._world_rank == 0 else NoBar()

    # --- other ways to define an operator

    @classmethod
    def from_ptl(cls, *args: Any, **kwargs: Any) -> type[TrainingOperator]:
        """Raise NotAvailable: a LightningModule is trained by Lightning itself, see docs/how-to/lightning.md."""
        raise NotAvailable(
            "TrainingOperator.from_ptl is not available; train the LightningModule with lightning's own Trainer and "
            "hpc_det.integrations.lightning (docs/how-to/lightning.md), or register its model and optimizers in setup()"
        )

    @classmethod
    def from_creators(
        cls,
        model_creator: Creator,
        optimizer_creator: Creator,
        data_creator: Creator | None = None,
        loss_creator: Creator | None = None,
        scheduler_creator: Creator | None = None,
        serialize_data_creation: bool = True,
    ) -> type[Any]:
        """Return a subclass of this class whose `setup` registers what the creator functions return.

        Its operators have the read-only properties `models`, `optimizers` and `schedulers` (lists), `model`,
        `optimizer` and `scheduler` (the first of each; `scheduler` may be None), and `criterion`.

        Args:
            model_creator: `model_creator(config)` returns a model, or a tuple or list of models.
            optimizer_creator: `optimizer_creator(models, config)` returns one or more optimizers; `models` is what
                `model_creator` returned.
            data_creator: `data_creator(config)` returns a training loader, or a tuple or list of a training and a
                validation loader. None: no data is registered.
            loss_creator: A loss class of torch.nn, called without arguments, or `loss_creator(config)` returns the
                criterion. None: no criterion.
            scheduler_creator: `scheduler_creator(optimizers, config)` returns one or more schedulers. None: no
                scheduler.
            serialize_data_creation: Whether `data_creator` runs on one rank of a node at a time (by a file lock), so
                that only the first one downloads the data.

        Raises:
            BadArgument: A ValueError; a creator is not callable.
        """
        creators = Creators(
            model_creator, optimizer_creator, data_creator, loss_creator, scheduler_creator, serialize_data_creation
        )

        class CreatorOperator(CreatorSetup, cls):  # type: ignore[misc, valid-type]
            _creators = creators

        return CreatorOperator


def _as_numbers(metrics: Metrics) -> Metrics:
    """Return the metrics with tensors converted to numbers."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def _accuracy(output: Any, target: Any) -> torch.Tensor | float:
    """Return the fraction of targets that equal the argmax of the output over dimension 1, or NaN."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or output.ndim < 2:
        return math.nan
    predicted = output.argmax(dim=1)
    # float64, so that 3 correct of 5 is exactly 0.6
    return (predicted == target).double().mean() if predicted.shape == target.shape else math.nan


# --- for tests: RaySGD has these two functions in its operator module, so users' tests may import them


def get_test_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Return a subclass whose `train_epoch` and `validate` call `config["custom_func"](self, iterator, info)`.

    Without a callable `custom_func` they return `{"done": 1}`.
    """

    class TestingOperator(operator_cls):  # type: ignore[misc, valid-type]
        def train_epoch(self, iterator: Iterable[Any], info: Mapping[str, Any]) -> Metrics:
            function = self.config.get("custom_func")
            result: Metrics = function(self, iterator, info) if callable(function) else {"done": 1}
            return result

        def validate(self, iterator: Iterable[Any], info: Mapping[str, Any]) -> Metrics:
            return self.train_epoch(iterator, info)

    return TestingOperator


def get_test_metrics_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Return a subclass whose batches report prescribed scores under the metric name `config["key"]`.

    Batch by batch, `train_batch` takes the next of `config["scores"]` and `validate_batch` the next of
    `config["val_scores"]`; the reported value is the score divided by the number of samples.
    """

    class TestMetricsOperator(operator_cls):  # type: ignore[misc, valid-type]
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self._scores = iter(config["scores"])
            self._val_scores = iter(config["val_scores"])

        def train_batch(self, batch: Any, batch_info: Mapping[str, Any] | None = None) -> Metrics:
            return self._scored(super().train_batch(batch, batch_info), self._scores)

        def validate_batch(self, batch: Any, batch_info: Mapping[str, Any] | None = None) -> Metrics:
            return self._scored(super().validate_batch(batch, batch_info), self._val_scores)

        def _scored(self, metrics: Metrics, scores: Iterator[float]) -> Metrics:
            return {**metrics, self.config["key"]: next(scores) / metrics[NUM_SAMPLES]}

    return TestMetricsOperator
