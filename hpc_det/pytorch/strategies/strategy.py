"""The interface between the loop and the kind of trial: a training batch, an evaluation, the content of a checkpoint.

The loop decides when, the strategy how. PyTorchTrial has hpc_det.pytorch.strategies.pytorch_strategy, DeepSpeedTrial
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
from hpc_det.core.progress import Progress
from hpc_det.distributed.collectives import Distributed
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.errors import UsageError, count, shown
from hpc_det.pytorch.data import Evaluation, TrainingData
from hpc_det.pytorch.trial.callback import Callbacks
from hpc_det.pytorch.trial.trial_context import TrialContext


class Trained(NamedTuple):
    """The objects that a strategy trains, in the order in which the trial wrapped them."""

    models: Sequence[torch.nn.Module]
    """Models; for DeepSpeed, its engines."""
    optimizers: Sequence[Any]
    schedulers: Sequence[Any]
    """Learning rate schedulers."""
    scaler: torch.amp.GradScaler | None = None
    """Gradient scaler."""
    replaced: frozenset[int] = frozenset()
    """The id() of each buffer that DDP overwrites with rank 0's at the next training batch; empty on rank 0."""


class Strategy(Protocol):
    """The strategy of one trial, created once per process."""

    context_class: ClassVar[type[TrialContext]]
    saves_on_every_rank: ClassVar[bool]
    """True if each rank saves its own models and callbacks; otherwise rank 0 saves for all."""
    records: int
    """Records that this rank has trained since its process started."""
    batch_ends: list[Callable[[int], None]]
    """Called in turn with the number of each batch, after its metrics were taken; complete from `begin` on."""

    @staticmethod
    def explained() -> AbstractContextManager[None]:
        """Return a context manager for the construction of the trial.

        Errors of libraries that the user can fix are raised as UsageError.
        """
        ...

    def __init__(self, trial: Any, context: Any) -> None: ...

    @property
    def mpu(self) -> ModelParallelUnit:
        """This rank's part of the data, and whether its metrics count."""
        ...

    @property
    def micro_batches(self) -> int:
        """Number of batches of the loader in a training batch."""
        ...

    @property
    def micro_batch_size(self) -> int | None:
        """Records that a batch of an hpc_det DataLoader must have; None if the trial chooses."""
        ...

    @property
    def evaluation(self) -> Evaluation:
        """The ranks that take part in one call of evaluate_batch."""
        ...

    def check(self) -> None:
        """Raise UsageError if the trial's `__init__` is incomplete."""
        ...

    # --- training

    def begin(self, data: TrainingData, batches: Iterator[Any] | None, progress: Progress) -> Any:
        """Return the iterator for `train_batch`, before anything is restored.

        `batches`: None if other ranks load them. `progress`: the loop's object, which it updates after each stretch of
        batches.
        """
        ...

    def train_batch(self, batches: Any, epoch: int, number: int) -> Any:
        """Train batch `number`, count its records, and return the trial's result."""
        ...

    # --- validation

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context manager around the evaluations of a validation. Collective.

        Models are in eval mode, with the buffers that the next training batch would use.
        """
        ...

    def evaluate(self, batches: Any, number: int) -> Any:
        """Return the result of `evaluate_batch` for the next batch; `batches` is None if other ranks load them."""
        ...

    def trained(self) -> Trained:
        """Return the trained objects, from `begin` on."""
        ...

    def owned(self) -> Iterator[object]:
        """Yield the objects that training changes and reducers may refer to."""
        ...

    def snapshot(self, callbacks: Callbacks) -> Callable[[], None] | None:
        """Return a function that restores what a callback may change in a validation; None if nothing can change."""
        ...

    # --- checkpoints

    def check_savable(self, callbacks: Callbacks) -> None:
        """Raise HpcDetError that names values which no checkpoint can hold."""
        ...

    def expected(self, callbacks: Callbacks, window: MetricWindow) -> list[Any]:
        """Return the content of a later save, for the allocation of memory: what `files` would return, and what `write`
        would put.

        It calls no hooks.
        """
        ...

    def files(self, callbacks: Callbacks, window: MetricWindow) -> dict[str, Any]:
        """Return what this rank saves with torch.save, by file name."""
        ...

    def write(self, folder: Path, put: Put) -> None:
        """Write the rest of this rank's state into the partial folder of a checkpoint, directly or with `put`.

        Collective if each rank saves its own models.
        """
        ...

    def reads(self, name: str) -> bool:
        """Return whether this rank loads the file of that name in a resume.

        A wrong answer only costs time: another node reads the file, and this one reads it again.
        """
        ...

    def restore(self, folder: Path, callbacks: Callbacks) -> None:
        """Restore models, optimizers and schedulers. Raises HpcDetError if they do not fit."""
        ...

    def restore_weights(self, folder: Path) -> None:
        """Restore the weights of the models alone."""
        ...

    def restore_rank(self, folder: Path, ranks: int, window: MetricWindow) -> dict[str, Any] | None:
        """Restore this rank, and return the state of its random generators; None if the former gang did not have it."""
        ...


Evaluate = Callable[..., Any]


def numbered(evaluate: Evaluate) -> Evaluate:
    """Return `evaluate_batch` as a function of (batch, number), even if it does not take the number.

    It takes the number if it has a parameter `batch_idx` or a second required parameter.
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
    """The part of the data that a rank trains on, if several ranks may train one model.

    The gang has `data_parallel_world_size` copies of the model, and the rank a part of copy `data_parallel_rank`. A
    subclass may define these attributes as properties or as methods without arguments.

    Attributes:
      data_parallel_rank: Number of the copy, from 0.
      data_parallel_world_size: Number of copies.
      should_report_metrics: True if the metrics of this rank count.
      should_build_data_loader: True if this rank loads data.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool


def make_data_parallel_mpu(distributed: Distributed) -> ModelParallelUnit:
    """Return the unit of a rank with its own copy of the model."""
    return ModelParallelUnit(distributed.rank, distributed.size, True, True)


def make_deepspeed_mpu(grid: Any) -> ModelParallelUnit:
    """Return the unit for the grid of a PipelineEngine. Of ranks that share a stage, the first one loads data and
    reports.
    """
    is_first_of_stage = grid.get_slice_parallel_rank() == 0
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=is_first_of_stage and grid.is_last_stage,
        should_build_data_loader=is_first_of_stage and (grid.is_first_stage or grid.is_last_stage),
    )


def checked_unit(mpu: Any, ranks: int) -> ModelParallelUnit:
    """Return a ModelParallelUnit with the values of `mpu`, which may be of a subclass.

    Raises UsageError with all values that are impossible in a gang of `ranks` ranks.
    """
    if not isinstance(mpu, ModelParallelUnit):
        raise UsageError(f"ModelParallelUnit: got {shown(mpu)}; pass one, or an object of a subclass")
    unit = ModelParallelUnit(*(_value_of(mpu, field.name) for field in fields(ModelParallelUnit)))
    if problems := [f"{type(mpu).__name__}.{problem}" for problem in _problems(unit, ranks)]:
        raise UsageError(problems)
    return unit


def _value_of(mpu: ModelParallelUnit, name: str) -> Any:
    value = getattr(mpu, name, None)
    return value() if callable(value) else value


def _problems(unit: ModelParallelUnit, ranks: int) -> Iterator[str]:
    wrong = list(_wrong_types(unit))
    yield from wrong
    if wrong:
        return
    rank, size = unit.data_parallel_rank, unit.data_parallel_world_size
    if size < 1 or ranks % size:
        yield (
            f"data_parallel_world_size: {count(size, 'copy')} of the model do not have the same number of the "
            f"{count(ranks, 'rank')}; use a divisor of {ranks}"
        )
    if size >= 1 and not 0 <= rank < size:
        yield f"data_parallel_rank: {rank} is not one of 0 to {size - 1}, as data_parallel_world_size is {size}"


def _wrong_types(unit: ModelParallelUnit) -> Iterator[str]:
    for field, value in zip(fields(unit), astuple(unit), strict=True):
        expected: type = int if field.name.startswith("data_parallel") else bool
        if type(value) is not expected:
            yield f"{field.name}: {shown(value)} is {type(value).__name__}; expected {expected.__name__}"


def reporting_ranks(reports: Sequence[bool]) -> list[int]:
    """Return the ranks whose metrics count. `reports`: should_report_metrics by rank. Raises UsageError for none."""
    if not any(reports):
        raise UsageError("ModelParallelUnit: should_report_metrics is False on all ranks; let at least one report")
    return [rank for rank, does in enumerate(reports) if does]
