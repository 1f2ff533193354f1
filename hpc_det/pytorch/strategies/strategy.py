"""What the one loop leaves to the kind of trial: one training batch, one evaluation, what a checkpoint holds.

The loop decides when; the strategy does. PyTorchTrial has hpc_det.pytorch.strategies.pytorch_strategy, DeepSpeedTrial
hpc_det.pytorch.deepspeed.strategy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.errors import UsageError, shown
from hpc_det.pytorch.data import Evaluation, TrainingData
from hpc_det.pytorch.loop.schedule import Progress
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.trial_context import TrialContext


class Trained(NamedTuple):
    """What a strategy trains, in the order in which the trial has wrapped it."""

    models: Sequence[torch.nn.Module]
    """Of DeepSpeed, its engines."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    """Of learning rates."""
    scaler: torch.amp.GradScaler | None = None
    """Of losses."""
    replaced: frozenset[int] = frozenset()
    """Ids of the buffers of models that rank 0 replaces by its own at the next batch. On rank 0 there are none."""


class Strategy(Protocol):
    """Made once per process, when the trial is built."""

    context_class: ClassVar[type[TrialContext]]
    saves_on_every_rank: ClassVar[bool]
    """Whether each rank saves models and callbacks of its own, or rank 0 does for all."""

    @staticmethod
    def explained() -> AbstractContextManager[None]:
        """Around the making of a trial: what a user should read otherwise is raised as a UsageError."""
        ...

    def __init__(self, trial: Any, context: Any) -> None: ...

    @property
    def mpu(self) -> ModelParallelUnit:
        """Which part of the data this rank trains on, and whether its metrics count."""
        ...

    @property
    def micro_batches(self) -> int:
        """So many batches of the loader make a batch of training."""
        ...

    @property
    def micro_batch_size(self) -> int | None:
        """Records that a batch of an hpc_det DataLoader must have; None: as many as the user likes."""
        ...

    @property
    def evaluation(self) -> Evaluation: ...

    def check(self) -> None:
        """Raises UsageError for what the trial's `__init__` has left out."""
        ...

    # --- training

    def begin(self, data: TrainingData, batches: Iterator[Any] | None, progress: Progress) -> Any:
        """Before anything is restored: what `train_batch` takes its batches from.

        `batches`: None where others load them. `progress`: the loop's own, which grows after each stretch of batches.
        """
        ...

    def train_batch(self, batches: Any, epoch: int, number: int) -> tuple[Any, int]:
        """One batch of training, number `number`: what the trial returned of it, and its records on this rank."""
        ...

    def end_batch(self, number: int) -> None:
        """After each; its metrics are taken."""
        ...

    # --- validation

    def evaluating(self) -> AbstractContextManager[None]:
        """Collective: around a validation, with what it needs to see of the other ranks."""
        ...

    def evaluate(self, batches: Any, number: int) -> Any:
        """What `evaluate_batch` returns of the next of `batches`, which is None where others load them."""
        ...

    def trained(self) -> Trained:
        """From `begin` on."""
        ...

    def owned(self) -> Iterator[object]:
        """What training goes on to change, and reducers may hold."""
        ...

    def snapshot(self, callbacks: Callbacks) -> Callable[[], None] | None:
        """What a callback may change in a validation, as what puts it back. None where nobody could."""
        ...

    # --- checkpoints

    def check_savable(self, callbacks: Callbacks) -> None:
        """Raises HpcDetError naming what no checkpoint could hold."""
        ...

    def expected(self, callbacks: Callbacks, window: MetricWindow) -> list[Any]:
        """First what `files` would return now, with what else is known to be saved later; then each content that
        `write` would put. No hook is called.
        """
        ...

    def files(self, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
        """What this rank saves by torch.save, by file name."""
        ...

    def write(self, folder: Path, put: Put) -> None:
        """Collective, where each rank saves its own: what else it saves in the partial folder of a checkpoint, by `put`
        or written into it.
        """
        ...

    def reads(self, name: str) -> bool:
        """Whether this rank loads the file of that name when it goes on from a checkpoint.

        A wrong answer costs time: the file is read by another node, and once more by this one.
        """
        ...

    def restore(self, folder: Path, callbacks: Callbacks) -> None:
        """Models, and all that trains them, as they were saved. Raises HpcDetError where they do not fit."""
        ...

    def restore_weights(self, folder: Path) -> None:
        """Of the models alone."""
        ...

    def restore_rank(self, folder: Path, ranks: int, window: MetricWindow) -> dict[str, Any] | None:
        """Everything of this rank but its generators, whose state is returned; None if it was not in the gang."""
        ...


Evaluate = Callable[..., Any]


def numbered(evaluate: Evaluate) -> Evaluate:
    """`evaluate_batch` as a function of (batch, number), whether its signature takes the number or not.

    It does with a parameter `batch_idx`, or a second one that must be given.
    """
    parameters = inspect.signature(evaluate).parameters
    if "batch_idx" in parameters:
        return lambda batch, number: evaluate(batch, batch_idx=number)
    needed = [each for each in parameters.values() if each.default is each.empty]
    if len([each for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD]) > 1:
        return evaluate
    if any(each.kind is each.VAR_POSITIONAL for each in needed):
        return evaluate
    return lambda batch, number: evaluate(batch)


@dataclass
class ModelParallelUnit:
    """Which part of the data a rank trains on, where several ranks may train one model.

    One rank's place: of `data_parallel_world_size` copies of the model it has a part of number
    `data_parallel_rank`.

    A subclass may have properties or methods without arguments in place of these attributes.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(distributed: Distributed) -> ModelParallelUnit:
    """For ranks that have a copy of the model each."""
    return ModelParallelUnit(distributed.rank, distributed.size, True, True)


def make_deepspeed_mpu(grid: Any) -> ModelParallelUnit:
    """For the grid of a PipelineEngine. Of the ranks that share a stage the first one loads data and reports."""
    is_first_of_stage = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=is_first_of_stage and grid.is_last_stage,
        should_build_data_loader=is_first_of_stage and (grid.is_first_stage or grid.is_last_stage),
    )


def checked_unit(mpu: Any, ranks: int) -> ModelParallelUnit:
    """What a unit of any subclass says. Raises UsageError with all that cannot be so in a gang of so many ranks."""
    if not isinstance(mpu, ModelParallelUnit):
        raise UsageError(f"ModelParallelUnit: got {shown(mpu)}; pass one, or an object of a subclass")
    said = ModelParallelUnit(*(_said(mpu, field.name) for field in fields(ModelParallelUnit)))
    if problems := [f"{type(mpu).__name__}.{problem}" for problem in _problems(said, ranks)]:
        raise UsageError(problems)
    return said


def _said(mpu: ModelParallelUnit, name: str) -> Any:
    value = getattr(mpu, name, None)
    return value() if callable(value) else value


def _problems(said: ModelParallelUnit, ranks: int) -> Iterator[str]:
    wrong = list(_wrong_types(said))
    yield from wrong
    if wrong:
        return
    rank, size = said.data_parallel_rank, said.data_parallel_world_size
    if size < 1 or ranks % size:
        yield (
            f"data_parallel_world_size: {size} copies of the model do not have the same number of the {ranks} ranks; "
            f"use a divisor of {ranks}"
        )
    if size >= 1 and not 0 <= rank < size:
        yield f"data_parallel_rank: {rank} is not one of 0 to {size - 1}, as data_parallel_world_size is {size}"


def _wrong_types(said: ModelParallelUnit) -> Iterator[str]:
    for field, value in zip(fields(said), astuple(said), strict=True):
        expected: type = int if field.name.startswith("data_parallel") else bool
        if type(value) is not expected:
            yield f"{field.name}: {shown(value)} is {type(value).__name__}; expected {expected.__name__}"


def reporting_ranks(reports: Sequence[bool]) -> list[int]:
    """The ranks whose metrics count, from what each rank's unit says. Raises UsageError for none."""
    if not any(reports):
        raise UsageError("ModelParallelUnit: should_report_metrics is False on all ranks; let at least one report")
    return [rank for rank, does in enumerate(reports) if does]
