"""What the one loop leaves to the kind of trial: one training batch, one evaluation, what a checkpoint holds.

The loop decides when; the strategy does. PyTorchTrial has hpc_det.pytorch.strategies.plain, DeepSpeedTrial
hpc_det.pytorch.deepspeed.strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from hpc_det.checkpoint.checkpoints import Put
from hpc_det.distributed.metrics import MetricWindow
from hpc_det.pytorch.data import Evaluation, TrainingData
from hpc_det.pytorch.loop.progress import Progress
from hpc_det.pytorch.strategies.model_parallel import ModelParallelUnit
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
