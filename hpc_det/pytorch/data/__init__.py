"""One rank's data in a reproducible order: a function of the trial's seed and the epoch, continued at any position.

A global batch consists of the next `global_batch_size` records in the epoch's order; each rank gets a contiguous share
of it. The position counts the records that are done. A run that resumes, also on another number of ranks, continues at
the right record: no record is repeated or skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Protocol

import torch

from hpc_det.core.external_loader import length_of
from hpc_det.core.progress import Position
from hpc_det.distributed.collectives import Distributed
from hpc_det.errors import count
from hpc_det.pytorch.data.batch_shapes import Shapes
from hpc_det.pytorch.data.data_loader import DataLoader
from hpc_det.pytorch.data.external_loader import ExternalTraining, ExternalValidation
from hpc_det.pytorch.data.micro_batches import Counted, Evaluation, MicroBatches, rounds_of
from hpc_det.pytorch.data.shared_batches import SharedTraining, SharedValidation

__all__ = [
    "Counted",
    "DataLoader",
    "Evaluation",
    "TorchData",
    "TrainingData",
    "ValidationData",
    "training_data",
    "validation_data",
]

ALONE = Distributed()
"""A gang of one rank."""

TorchData = dict[str, Any] | list[Any] | tuple[Any, ...] | torch.Tensor


class TrainingData(Protocol):
    """One rank's view of the training data."""

    loads_in_workers: bool
    """Whether worker processes load the data."""
    is_shared_out: bool
    """Whether hpc_det divides the data among the ranks.

    Then positions are exact, and `train_batch` must take exactly the micro batches that make up a batch.
    """

    @property
    def batches_per_epoch(self) -> int | Fraction | None:
        """Batches per epoch; a fraction if an epoch's last batch continues in the next one. None: epochs never end."""
        ...

    def whole_batches(self, position: Position) -> int:
        """Return the number of whole batches from `position` on within the epoch; 0 if the next one is not whole."""
        ...

    def after(self, position: Position, batches: int = 1) -> Position:
        """Return the position after `batches` batches from `position`.

        `batches` is 1, or at most `whole_batches(position)`.
        """
        ...

    def batches(self, position: Position) -> Iterator[Any]:
        """Yield this rank's batches (micro batches, if several make up one) from `position` on, endlessly.

        A rank without a loader must not take batches: its stand-in raises UsageError when it loads.
        """
        ...

    def close(self) -> None:
        """End the worker processes. Repeated calls are allowed, and `batches` may be called afterwards."""
        ...


class ValidationData(Protocol):
    """One rank's view of the validation data."""

    loads_in_workers: bool
    length: int | None
    """Number of rounds (evaluations) of this rank; None if the loader has no length."""

    def batches(self) -> Iterator[Any]:
        """Yield this rank's share once; the shares of all ranks contain each record once.

        An external loader yields all of its batches. If ranks evaluate together, the number of batches is the number
        that their rounds take (see `Evaluation`). A rank without a loader must not take batches.
        """
        ...

    def rounds(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        """Yield, for each evaluation, the iterator to take its batches from, and whether its result counts.

        `batches`: the iterator from `batches()`; None on a rank without a loader.
        """
        ...

    def whole(self) -> Iterable[Any]:
        """Return all batches of the data set, not only this rank's share."""
        ...

    def close(self) -> None:
        """End the worker processes, including those of an abandoned pass."""
        ...


def training_data(
    loader: DataLoader | Iterable[Any] | None,
    *,
    rank: int,
    size: int,
    seed: int,
    gang: Distributed = ALONE,
    per_batch: int = 1,
    same_size: bool = False,
) -> TrainingData:
    """Return this rank's training data. Collective over `gang`.

    `rank` and `size` are those of data parallelism. A rank without a loader only counts positions, like the others.
    `per_batch`: batches of the loader that make up one batch of training. `same_size`: all batches must have the same
    size; for an external loader this is not checked.

    Raises UsageError for too few records, and if ranks do not load the same data.
    """
    shapes = Shapes.gathered("training", loader, rank, gang)
    shapes.check()
    loader = shapes.stand_in(rank) if loader is None else loader
    data: TrainingData
    if isinstance(loader, DataLoader):
        data = SharedTraining(
            loader, rank=rank, size=size, seed=seed, relies_on_length=not shapes.all_load, same_size=same_size
        )
    else:
        data = ExternalTraining(loader, shapes.shortest)
    return data if per_batch == 1 else MicroBatches(data, per_batch)


def validation_data(
    loader: DataLoader | Iterable[Any] | None,
    *,
    rank: int,
    size: int,
    seed: int,
    gang: Distributed = ALONE,
    evaluation: Evaluation = Evaluation.APART,
    per_batch: int = 1,
) -> ValidationData:
    """Return this rank's validation data. Collective over `gang`.

    `rank` and `size` are those of data parallelism. If a rank has no loader, all ranks evaluate together. `per_batch`:
    batches of the loader in one evaluation of a pipeline.

    Raises UsageError for too few records, and if ranks evaluate together and do not load the same data.
    """
    shapes = Shapes.gathered("validation", loader, rank, gang)
    if evaluation is Evaluation.APART and not shapes.all_load:
        # A rank without a loader is part of the model of a rank with one, so it must take part in each evaluation.
        evaluation = Evaluation.TOGETHER
    if evaluation is not Evaluation.APART:
        shapes.check()
    loader = shapes.stand_in(rank) if loader is None else loader
    if not isinstance(loader, DataLoader):
        external = ExternalValidation(loader, rounds_of(evaluation, length_of(loader), shapes.lengths, per_batch), size)
        if external.is_cut and gang.is_chief and (length := length_of(loader)) is not None:
            print(
                f"hpc-det: note: build_validation_data_loader: a {type(loader).__name__} may never end; a validation "
                f"takes {count(length, 'batch')} of it, its len()",
                flush=True,
            )
        return external
    data = SharedValidation(loader, rank=rank, size=size, seed=seed, evaluation=evaluation, per_batch=per_batch)
    if data.left_out and gang.is_chief:
        print(f"hpc-det: validation leaves out {data.left_out}", flush=True)
    return data
