"""TrainingOperator: what a user says of models, data and steps. Each rank has one.

Or it is made of creators, functions of the config, as RaySGD had them before it had `setup`.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.loss import _Loss

from hpc_det.errors import HpcDetError, UsageError, shown
from hpc_det.pytorch.strategies.ddp import DataParallel, share_buffers
from hpc_det.sgd.operator.base import BaseOperator
from hpc_det.sgd.operator.meters import AverageMeterCollection, NoBar, bar_over
from hpc_det.sgd.operator.options import EPOCH_IDX, NUM_SAMPLES, NUM_STEPS, BadArgument, NotSet

Creator = Callable[..., Any]


@dataclass(frozen=True)
class Creators:
    """Raises BadArgument, a ValueError, for one that cannot be called."""

    model_creator: Creator
    """(config) -> a model, or a tuple or list of them."""
    optimizer_creator: Creator
    """(models, config), with models as they were given -> one or more optimizers."""
    data_creator: Creator | None
    """(config) -> a loader to train on, or a sequence of that and of one to validate on."""
    loss_creator: Creator | None
    """A class of torch's losses, or (config) -> the criterion."""
    scheduler_creator: Creator | None
    """(optimizers, config) -> one or more schedulers."""
    serialize_data_creation: bool
    """Whether the ranks of a node create data one after the other: the first downloads what the others find."""

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self) if field.name.endswith("_creator")}
        needed = ("model_creator", "optimizer_creator")
        if problems := [
            f"from_creators: {name} is {shown(value)}; give a function"
            for name, value in given.items()
            if not callable(value) and (value is not None or name in needed)
        ]:
            raise BadArgument(problems)

    def loaders(self, config: dict[str, Any]) -> tuple[Any, Any]:
        """For training and for validation; None without."""
        if self.data_creator is None:
            return None, None
        with _one_rank_at_a_time() if self.serialize_data_creation else nullcontext():
            given = self.data_creator(config)
        loaders = list(given) if isinstance(given, (tuple, list)) else [given]
        if given is None or len(loaders) not in (1, 2):
            raise BadArgument(
                f"data_creator returned {shown(given)}; return a loader, or one to train and one to validate"
            )
        return loaders[0], loaders[1] if len(loaders) == 2 else None

    def criterion(self, config: dict[str, Any]) -> Any:
        if self.loss_creator is None:
            return None
        is_loss = isinstance(self.loss_creator, type) and issubclass(self.loss_creator, _Loss)
        return self.loss_creator() if is_loss else self.loss_creator(config)


class CreatorSetup(BaseOperator):
    """`setup` by creators; what the default loops use is the first of each kind."""

    _creators: Creators

    def setup(self, config: dict[str, Any]) -> None:
        make = self._creators
        train_loader, validation_loader = make.loaders(config)
        models = make.model_creator(config)
        optimizers = make.optimizer_creator(models, config)
        schedulers = make.scheduler_creator(optimizers, config) if make.scheduler_creator else None
        self.register(models=models, optimizers=optimizers, criterion=make.criterion(config), schedulers=schedulers)
        self.register_data(train_loader=train_loader, validation_loader=validation_loader)

    @property
    def models(self) -> list[Any]:
        return list(self._wrapped)

    @property
    def model(self) -> Any:
        return self._wrapped[0]

    @property
    def optimizers(self) -> list[Any]:
        return list(self._optimizers)

    @property
    def optimizer(self) -> Any:
        return self._optimizers[0]

    @property
    def schedulers(self) -> list[Any]:
        return list(self._schedulers)

    @property
    def scheduler(self) -> Any:
        """None without."""
        return self._schedulers[0] if self._schedulers else None

    @property
    def criterion(self) -> Any:
        """None without."""
        return self._criterion


@contextmanager
def _one_rank_at_a_time() -> Iterator[None]:
    """On this node, and of this user."""
    path = Path(tempfile.gettempdir()) / f"hpc_det-{os.geteuid()}.data.lock"
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise HpcDetError(
            f"{path}: {error.strerror}; ranks that create data one after the other lock this file: set TMPDIR to a "
            f"folder of yours on this node, or use from_creators(..., serialize_data_creation=False)"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)  # a worker that was forked meanwhile holds the file open, too
        os.close(lock)


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

        The fields of `Creators` say what each takes and returns. An operator has lists `models`,
        `optimizers` and `schedulers`, the first of each as `model`, `optimizer` and `scheduler`, and `criterion`.

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
