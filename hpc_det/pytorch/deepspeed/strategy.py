"""The strategy of a DeepSpeedTrial: engines step their optimizers, and every rank saves its part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.checkpoint.content import check_loadable
from hpc_det.checkpoint.node_folders import contains, rank_file
from hpc_det.core.progress import PROGRESS, Progress
from hpc_det.distributed.metrics import MetricWindow, named, number_of
from hpc_det.errors import UsageError, count
from hpc_det.pytorch.data import Counted, Evaluation, TrainingData
from hpc_det.pytorch.deepspeed.context import DeepSpeedTrialContext
from hpc_det.pytorch.deepspeed.runtime import explained
from hpc_det.pytorch.deepspeed.state import (
    expected,
    facts,
    is_read_by,
    load_engines,
    rank_state,
    restore_rank,
    save_facts,
    settings,
    stored_rank,
    tag,
)
from hpc_det.pytorch.strategies.strategy import ModelParallelUnit, Trained, numbered
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.trial import implements
from hpc_det.pytorch.trial.trial_context import TrialContext

if TYPE_CHECKING:
    from hpc_det.pytorch.deepspeed.trial import DeepSpeedTrial


class DeepSpeedStrategy:
    """The Strategy of a DeepSpeedTrial; see there for methods without a docstring."""

    context_class: ClassVar[type[TrialContext]] = DeepSpeedTrialContext
    saves_on_every_rank: ClassVar = True

    @staticmethod
    def explained() -> AbstractContextManager[None]:
        return explained()

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        self._trial = trial
        self._context = context
        self._evaluate = numbered(trial.evaluate_batch)
        self._counted: Counted | None = None
        self.records = 0
        self.batch_ends: list[Callable[[int], None]] = []

    @property
    def mpu(self) -> ModelParallelUnit:
        return self._context.mpu

    @property
    def micro_batches(self) -> int:
        return self._context.get_num_micro_batches_per_slot()

    def check(self) -> None:
        name, context = type(self._trial).__name__, self._context
        context.check()
        if (
            context.evaluates_together
            and context.distributed.size > 1
            and implements(type(self._trial), "evaluate_full_dataset")
        ):
            raise UsageError(
                f"{name}: evaluate_full_dataset runs on rank 0 alone, and ZeRO-3 and pipelines need all ranks for each "
                f"batch; implement evaluate_batch"
            )

    @property
    def micro_batch_size(self) -> int:
        return self._context.get_train_micro_batch_size_per_gpu()

    @property
    def evaluation(self) -> Evaluation:
        if self._context.use_pipeline_parallel:
            return Evaluation.PIPELINED
        return Evaluation.TOGETHER if self._context.evaluates_together else Evaluation.APART

    # --- training

    def begin(self, data: TrainingData, batches: Iterator[Any] | None, progress: Progress) -> Counted | None:
        context = self._context
        self._calls = self.micro_batches if context.auto_grad_accumulation else 1
        self._records_of_batch = self.micro_batches * context.get_train_micro_batch_size_per_gpu()
        self._numbers = _numbers if self.mpu.should_report_metrics else _nothing
        self._accumulating = [] if context.use_pipeline_parallel else context.models
        for engine in context.models:
            engine.train()
        self.batch_ends.append(self.end_batch)
        if batches is not None:
            self._counted = Counted(batches, self.micro_batches if data.is_shared_out else None)
        return self._counted

    def train_batch(self, batches: Any, epoch: int, number: int) -> Any:
        train_batch, numbers = self._trial.train_batch, self._numbers
        if self._calls == 1:
            metrics = train_batch(batches, epoch, number)
        else:
            metrics = mean([numbers(train_batch(batches, epoch, number)) for _ in range(self._calls)])
        self.records += self._records_of_batch
        return metrics

    def end_batch(self, number: int) -> None:
        """Raise UsageError for a batch whose engines were not used as their configuration says."""
        if self._counted:
            self._counted.end_batch(number)
        if thawed := sum(parameter.requires_grad for parameter in self._context.settled):
            raise UsageError(
                f"train_batch: at batch {number} {thawed} parameters require gradients that were frozen at "
                f"deepspeed.initialize, and the optimizer would never train them: thaw them before "
                f"deepspeed.initialize, or freeze them after it"
            )
        for engine in self._accumulating:
            if engine.micro_steps % engine.gradient_accumulation_steps():
                raise UsageError(_unfinished(engine, number))
        if self._accumulating and not any(engine.global_steps for engine in self._accumulating):
            raise UsageError("train_batch: no engine has made a step; call engine.backward(loss) and engine.step()")

    # --- validation

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for engine in self._context.models:
            engine.eval()
        yield
        for engine in self._context.models:
            engine.train()

    def evaluate(self, batches: Any, number: int) -> Any:
        return self._evaluate(batches, number)

    def trained(self) -> Trained:
        engines = self._context.models
        optimizers = [engine.optimizer for engine in engines if engine.optimizer]
        return Trained(engines, optimizers, [engine.lr_scheduler for engine in engines if engine.lr_scheduler])

    def owned(self) -> Iterator[object]:
        yield from (self._trial, self._context, *self._context.models)
        for engine in self._context.models:
            yield from (engine.optimizer, engine.lr_scheduler)
            yield from (*engine.module.modules(), *engine.module.parameters(), *engine.module.buffers())

    def snapshot(self, callbacks: Callbacks) -> None:
        """Return None: no rank has all weights of an engine, so a validation that may change some is never
        interrupted.
        """

    # --- checkpoints

    def check_savable(self, callbacks: Callbacks) -> None:
        engines = {tag(number): settings(engine) for number, engine in enumerate(self._context.models)}
        check_loadable({rank_file(self._context.distributed.rank): {"callbacks": callbacks.state()}, **engines})

    def expected(self, callbacks: Callbacks, window: MetricWindow) -> list[Any]:
        """Return what engines will save, which is known if the trial saves them as DeepSpeedTrial does."""
        engines = [] if implements(type(self._trial), "save") else self._context.models
        return [rank_state(self._context, callbacks, window), *(part for each in engines for part in expected(each))]

    def files(self, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
        state = rank_state(self._context, callbacks, window)
        callbacks.call("on_checkpoint_save_start", state)
        return {rank_file(self._context.distributed.rank): state}

    def write(self, folder: Path, put: Put) -> None:
        with self._context.shards.part_of(folder, put):
            self._trial.save(self._context, folder)
        save_facts(self._context, folder)

    def reads(self, name: str) -> bool:
        own = rank_file(self._context.distributed.rank)
        return name == PROGRESS or contains(name, own) or is_read_by(self.mpu.data_parallel_rank, name)

    def restore(self, folder: Path, callbacks: Callbacks) -> None:
        _ = facts(folder)  # raises for a checkpoint of another kind of trial
        state = stored_rank(folder, self._context)
        callbacks.call("on_checkpoint_load_start", state)
        self._trial.load(self._context, folder)
        callbacks.restore(state["callbacks"])

    def restore_weights(self, folder: Path) -> None:
        load_engines(self._context, folder, weights_alone=True)

    def restore_rank(self, folder: Path, ranks: int, window: MetricWindow) -> dict[str, Any] | None:
        return restore_rank(folder, ranks, self._context, window)


def _numbers(metrics: Any) -> dict[str, float | torch.Tensor | None]:
    """Return the metrics of `train_batch` without their autograd graphs, whose memory the next micro batch needs.

    Values that are not numbers become None.
    """
    return {name: number_of(value) for name, value in named(metrics).items()}


def _nothing(metrics: Any) -> dict[str, Any]:
    """Return no metrics, for a rank whose metrics do not count and may be anything."""
    return {}


def mean(metrics: Sequence[Mapping[str, float | torch.Tensor | None]]) -> dict[str, Any]:
    """Return the mean over the micro batches of a batch; None if one of them is not a number.

    Raises UsageError if their names differ.
    """
    for each in metrics[1:]:
        if each.keys() != metrics[0].keys():
            raise UsageError(
                f"train_batch: metric names changed between micro batches: {sorted(metrics[0])} before, "
                f"{sorted(each)} now; return the same names every time"
            )
    return {name: _mean_of([each[name] for each in metrics]) for name in metrics[0]}


def _mean_of(numbers: Sequence[float | torch.Tensor | None]) -> Any:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if len(known) == len(numbers) else None


def _unfinished(engine: Any, number: int) -> str:
    steps = engine.gradient_accumulation_steps()
    return (
        f"train_batch: after batch {number} an engine is at micro batch {engine.micro_steps % steps} of {steps} "
        f"(gradient_accumulation_steps); call its backward and step once in each call of train_batch, or, after "
        f"context.disable_auto_grad_accumulation(), {count(steps, 'time')}"
    )
