"""The strategy of a PyTorchTrial: the trial steps its optimizers, DDP averages gradients, rank 0 saves models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.checkpoint.content import check_loadable
from hpc_det.checkpoint.node_folders import contains, rank_file, shard_file
from hpc_det.core.progress import PROGRESS, Progress
from hpc_det.core.sharded_tensors import own_part, shards_in, without_shards
from hpc_det.core.state_dicts import parameters_of
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.errors import UsageError
from hpc_det.pytorch.data import Evaluation, TrainingData
from hpc_det.pytorch.state.state import (
    STATE_DICT,
    model_state,
    rank_state,
    restore_models,
    restore_rank,
    restore_weights,
    stored_state,
    takes_buffers,
    trained_state,
)
from hpc_det.pytorch.strategies.ddp import DataParallel, share_buffers
from hpc_det.pytorch.strategies.parameters import is_sharded, reshard
from hpc_det.pytorch.strategies.strategy import Trained, make_data_parallel_mpu, numbered
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.pytorch_context import PyTorchTrialContext
from hpc_det.pytorch.trial.trial_context import TrialContext

if TYPE_CHECKING:
    from hpc_det.pytorch.trial.trial import PyTorchTrial


class PyTorchStrategy:
    """The Strategy of a PyTorchTrial; see there for methods without a docstring."""

    context_class: ClassVar[type[TrialContext]] = PyTorchTrialContext
    saves_on_every_rank: ClassVar = False
    micro_batches = 1
    micro_batch_size = None

    @staticmethod
    def explained() -> AbstractContextManager[None]:
        return nullcontext()

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext) -> None:
        self.mpu = make_data_parallel_mpu(context.distributed)
        self._trial = trial
        self._context = context
        self._evaluate = numbered(trial.evaluate_batch)
        self.records = 0
        self.batch_ends: list[Callable[[int], None]] = []

    @property
    def evaluation(self) -> Evaluation:
        return Evaluation.TOGETHER if self._context.has_sharded_models else Evaluation.APART

    def check(self) -> None:
        name, context = type(self._trial).__name__, self._context
        problems = [
            f"{name}: __init__ wraps no {what}; call context.wrap_{what}, or a checkpoint would miss it"
            for what, wrapped in (("model", context.models), ("optimizer", context.optimizers))
            if not wrapped
        ]
        problems += [
            f"{name}: {type(model.module).__name__} got other parameters after wrap_model, whose gradients would not "
            f"be exchanged; add and replace layers before it"
            for model in context.wrapped_models
            if isinstance(model, DataParallel) and model.has_other_parameters and not is_sharded(model.module)
        ]
        models = {id(parameter) for model in context.models for parameter in model.parameters()}
        trained = [parameter for optimizer in context.optimizers for parameter in parameters_of(optimizer)]
        loose = sum(id(parameter) not in models for parameter in trained)
        if context.has_sharded_models:
            problems += [f"{name}: {problem}" for problem in self._sharded_problems(loose)]
        if problems:
            raise UsageError(problems)
        if loose:
            warnings.warn(
                f"{name}: optimizers train {loose} parameters of no wrapped model, which no checkpoint holds and ranks "
                f"do not share; make them parameters of a model, and wrap that",
                stacklevel=2,
            )

    def _sharded_problems(self, loose: int) -> Iterator[str]:
        """Yield the problems of sharded models. `loose`: number of parameters in optimizers that no wrapped
        model has.
        """
        from hpc_det.pytorch.trial.trial import implements  # which imports this module

        for model, wrapped in zip(self._context.models, self._context.wrapped_models, strict=True):
            if isinstance(wrapped, DataParallel) and is_sharded(model):
                yield f"{type(model).__name__} is sharded after wrap_model; call fully_shard before it"
        if loose:
            yield (
                f"optimizers train {loose} parameters that no wrapped model has, since fully_shard "
                f"replaces parameters; create optimizers after it"
            )
        if implements(type(self._trial), "evaluate_full_dataset"):
            yield (
                "evaluate_full_dataset runs on rank 0 alone, but a sharded model needs all ranks for each batch; "
                "implement evaluate_batch"
            )

    # --- training

    def begin(self, data: TrainingData, batches: Iterator[Any] | None, progress: Progress) -> Iterator[Any]:
        self._data, self._progress = data, progress
        context = self._context
        self._aggregation = context.aggregation_frequency
        context.begin_fusion()
        from hpc_det.pytorch.trial.trial import PyTorchTrial  # which imports this module

        self._has_own_length = type(self._trial).get_batch_length is not PyTorchTrial.get_batch_length
        if context.precision.scales_losses or context.scheduled_steps or context.fusion:
            self.batch_ends.append(self.end_batch)
        self._set_training_mode(True)
        if batches is None:
            raise UsageError("build_training_data_loader returned None; every rank of a PyTorchTrial loads its share")
        return batches

    def train_batch(self, batches: Iterator[Any], epoch: int, number: int) -> Any:
        batch = next(batches)
        kind = type(batch)
        # The usual case without a call. Before the training, while the processor's cache has the tensor's attributes.
        if (
            (kind is tuple or kind is list)
            and not self._has_own_length
            and batch
            and type(first := batch[0]) is Tensor
            and (shape := first.shape)
        ):
            self.records += shape[0]
        else:
            self.records += self._trial.get_batch_length(batch)
        if self._aggregation > 1 and (number + 1) % self._aggregation:
            with self._context.keeping_gradients():
                return self._trial.train_batch(batch, epoch, number)
        return self._trial.train_batch(batch, epoch, number)

    def end_batch(self, number: int) -> None:
        """Step the schedulers, and update the loss scale and the size of DDP's buckets, after an optimizer step."""
        if (number + 1) % self._context.aggregation_frequency:
            return
        if self._context.precision.scales_losses:
            self._context.precision.end_batch()
        for scheduled in self._context.scheduled_steps:
            scheduled.after_optimizer_step(
                number, self._context.aggregation_frequency, lambda: self._epochs_until_next_step(number)
            )
        if self._context.fusion and self._context.fusion.is_tuning:
            self._context.fusion.end_exchange()

    def _epochs_until_next_step(self, number: int) -> range:
        """Return the epochs that end between batch `number` and the batch of the next optimizer step."""
        start, trained = self._progress.position, number - self._progress.steps
        before = position = self._data.after(start, trained) if trained else start
        for _ in range(self._context.aggregation_frequency):
            position = self._data.after(position)
        return range(before.epoch, position.epoch)

    # --- validation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        share_buffers(self._context.wrapped_models)
        self._set_training_mode(False)
        yield
        reshard(self._context.models)
        self._set_training_mode(True)

    def evaluate(self, batches: Iterator[Any], number: int) -> Any:
        return self._evaluate(next(batches), number)

    def _set_training_mode(self, training: bool) -> None:
        for model in self._context.wrapped_models:
            model.train(training)
            if isinstance(model, DataParallel):
                model.alone = not training

    def trained(self) -> Trained:
        context = self._context
        models = zip(context.models, context.wrapped_models, strict=True)
        replaced = (
            id(buffer)
            for model, wrapped in models
            if not context.distributed.is_chief and takes_buffers(context, wrapped)
            for buffer in model.buffers()
        )
        scaler = context.precision.scaler
        return Trained(context.models, context.optimizers, context.lr_schedulers, scaler, frozenset(replaced))

    def owned(self) -> Iterator[object]:
        context = self._context
        yield from (self._trial, context, *context.optimizers, *context.lr_schedulers)
        if context.precision.scaler:
            yield context.precision.scaler
        for model in (*context.models, *context.wrapped_models):
            yield from (*model.modules(), *model.parameters(), *model.buffers())

    def snapshot(self, callbacks: Callbacks) -> Callable[[], None]:
        """Return a function that restores what callbacks may change in a validation, such as weights."""
        models = [
            {name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else value for name, value in state}
            for state in (model.state_dict().items() for model in self._context.models)
        ]
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in self._context.optimizers
            for group in optimizer.param_groups
        ]
        schedulers = [scheduler.state_dict() for scheduler in self._context.lr_schedulers]
        others = {"groups": groups, "schedulers": schedulers, "callbacks": callbacks.state()}
        return partial(self._put_back, {"models": models, **copy.deepcopy(others)}, callbacks)

    def _put_back(self, snapshot: dict[str, Any], callbacks: Callbacks) -> None:
        for model, state in zip(self._context.models, snapshot["models"], strict=True):
            model.load_state_dict(state)
        groups = (group for optimizer in self._context.optimizers for group in optimizer.param_groups)
        for group, former in zip(groups, snapshot["groups"], strict=True):
            group.update(former)
        for scheduler, state in zip(self._context.lr_schedulers, snapshot["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        callbacks.restore(snapshot["callbacks"])

    # --- checkpoints

    def check_savable(self, callbacks: Callbacks) -> None:
        if self._context.distributed.is_chief:
            check_loadable({STATE_DICT: without_shards(model_state(self._context, callbacks))})

    def expected(self, callbacks: Callbacks, window: MetricWindow) -> list[Any]:
        context = self._context
        parameters = [parameter for model in context.models for parameter in model.parameters()]
        gradients = [
            torch.empty_like(own_part(each), device="cpu")  # untouched pages take no memory
            for each in parameters
            if each.requires_grad and each.grad is None and context.aggregation_frequency > 1
        ]
        return [[self._files(callbacks, window), gradients]]

    def files(self, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
        files = self._files(callbacks, window)
        if STATE_DICT in files:
            callbacks.call("on_checkpoint_save_start", files[STATE_DICT])
        return files

    def _files(self, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
        context, rank = self._context, self._context.distributed.rank
        reshard(context.models)
        files = {rank_file(rank): rank_state(context, window)}
        if context.distributed.is_chief:
            files[STATE_DICT] = without_shards(model_state(context, callbacks))
        if context.has_sharded_models:
            files[shard_file(rank)] = shards_in(trained_state(context))
        return files

    def write(self, folder: Path, put: Put) -> None:
        """Write nothing: `files` returns everything."""

    def reads(self, name: str) -> bool:
        return name in (STATE_DICT, PROGRESS) or contains(name, rank_file(self._context.distributed.rank))

    def restore(self, folder: Path, callbacks: Callbacks) -> None:
        state = stored_state(folder, self._context.models)
        if callbacks.overrides("on_checkpoint_load_start"):
            # Callbacks may keep parts of it, and its tensors may be mapped from a file that is deleted later.
            state = copy.deepcopy(state)
            callbacks.call("on_checkpoint_load_start", state)
        restore_models(state, self._context, folder)
        callbacks.restore(copy.deepcopy(state["callbacks"]))

    def restore_weights(self, folder: Path) -> None:
        restore_weights(stored_state(folder, self._context.models), self._context, folder)

    def restore_rank(self, folder: Path, ranks: int, window: MetricWindow) -> dict[str, Any] | None:
        return restore_rank(folder, ranks, self._context, window)
