"""TrainingOperator: what a user says of models, data and steps. Each rank has one."""

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
from hpc_det.sgd.operator.options import EPOCH_IDX, NUM_SAMPLES, NUM_STEPS, NotSet

Metrics = dict[str, Any]
OnBatch = Callable[[Any, Mapping[str, Any]], Metrics]


class TrainingOperator(BaseOperator):
    """Derive from it, and register models, optimizers and data in `setup`.

    The default loops train `self.model` with `self.optimizer` on `self.criterion`. Override `train_batch` and
    `validate_batch`, or `train_epoch` and `validate`, for anything else.
    """

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: Mapping[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> Metrics:
        """Trains on all batches of `iterator` and steps `self.scheduler`: the means of what `train_batch` returned.

        `num_steps` and `epoch_idx` are for the bar alone; what `info` says of them comes first.
        """
        info = info or {}
        scheduler = self._scheduler_to_step()
        train_batch: OnBatch = self._train if self._has_default("train_batch") else self.train_batch
        meters = AverageMeterCollection()
        self._switch(training=True)
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
        """One step on `batch`, (*features, target): `train_loss` and `num_samples`."""
        return _as_numbers(self._train(batch, batch_info))

    def validate(self, val_iterator: Iterable[Any], info: Mapping[str, Any] | None = None) -> Metrics:
        """Evaluates all batches of `val_iterator`: the means of what `validate_batch` returned."""
        info = info or {}
        validate_batch: OnBatch = self._evaluate if self._has_default("validate_batch") else self.validate_batch
        meters = AverageMeterCollection()
        self._switch(training=False)
        with torch.no_grad(), self._evaluating():
            for batch_idx, batch in enumerate(val_iterator):
                meters.update(validate_batch(batch, {"batch_idx": batch_idx, **info}))
        return meters.summary()

    def validate_batch(self, batch: Any, batch_info: Mapping[str, Any]) -> Metrics:
        """Of `batch`, (*features, target): `val_loss`, `val_accuracy` and `num_samples`.

        Accuracy is the part of `target` that is where dimension 1 of the output is largest; NaN for a target that
        cannot be that, as in a regression.
        """
        return _as_numbers(self._evaluate(batch, batch_info))

    # --- the default steps; their metrics are tensors, so that nothing waits for a GPU

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
        """The loss, and what the model gave."""
        model, criterion = self._own("model"), self._own("criterion")
        with self.autocast():
            output = model(*features)
            return criterion(output, target), output

    def _on_device(self, batch: Any) -> Any:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise UsageError(
                f"a batch is {type(batch).__name__}, and the default train_batch and validate_batch take "
                f"(*features, target); override them for this data"
            )
        return self._to_device(batch) if self._to_device else batch

    # --- what the default loops need

    def _has_default(self, name: str) -> bool:
        return getattr(getattr(self, name), "__func__", None) is getattr(TrainingOperator, name)

    def _own(self, name: str) -> Any:
        value = getattr(self, name, None)
        if value is None:
            raise NotSet(
                f"{type(self).__name__}: self.{name} is not set, and the default loops need it; set it in setup, "
                f"as in self.model, self.optimizer, ... = self.register(...), or override train_batch or train_epoch"
            )
        return value

    def _scheduler_to_step(self) -> Any:
        """None where nothing is to be stepped. Raises NotSet where it cannot be known which."""
        if self._scheduler_step_freq not in ("batch", "epoch"):
            return None
        return self._own("scheduler") if self._schedulers else getattr(self, "scheduler", None)

    def _switch(self, *, training: bool) -> None:
        """`self.model`, or without one all that are registered."""
        model = getattr(self, "model", None)
        for switched in self._wrapped if model is None else [model]:
            switched.train(training)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Collective. Inside, ranks may have different numbers of batches: DDP exchanges nothing in a forward pass.

        All have rank 0's buffers, which DDP would have sent at the first batch. Nested, the inner one does nothing.
        """
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
        return bar_over(iterator, info) if self._use_tqdm and self._world_rank == 0 else NoBar()

    # --- other ways to an operator

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
        """A class of this kind whose `setup` registers what functions of the config make.

        The fields of hpc_det.sgd.operator.creators.Creators say what each takes and returns. An operator has lists
        `models`, `optimizers` and `schedulers`, the first of each as `model`, `optimizer` and `scheduler`, and
        `criterion`.

        Raises BadArgument, a ValueError, for one that cannot be called.
        """
        creators = Creators(
            model_creator, optimizer_creator, data_creator, loss_creator, scheduler_creator, serialize_data_creation
        )

        class CreatorOperator(CreatorSetup, cls):  # type: ignore[misc, valid-type]
            _creators = creators

        return CreatorOperator


def _as_numbers(metrics: Metrics) -> Metrics:
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def _accuracy(output: Any, target: Any) -> torch.Tensor | float:
    """In float64, so that 3 of 5 is 0.6."""
    if not isinstance(output, torch.Tensor) or not isinstance(target, torch.Tensor) or output.ndim < 2:
        return math.nan
    predicted = output.argmax(dim=1)
    return (predicted == target).double().mean() if predicted.shape == target.shape else math.nan


# --- for tests


def get_test_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Its `train_epoch` and `validate` are config["custom_func"](self, iterator, info)."""

    class TestingOperator(operator_cls):  # type: ignore[misc, valid-type]
        def train_epoch(self, iterator: Iterable[Any], info: Mapping[str, Any]) -> Metrics:
            function = self.config.get("custom_func")
            result: Metrics = function(self, iterator, info) if callable(function) else {"done": 1}
            return result

        def validate(self, iterator: Iterable[Any], info: Mapping[str, Any]) -> Metrics:
            return self.train_epoch(iterator, info)

    return TestingOperator


def get_test_metrics_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Batch by batch it returns the next of config["scores"], or ["val_scores"], a sample, under config["key"]."""

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
