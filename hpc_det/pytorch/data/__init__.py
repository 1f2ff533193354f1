"""One rank's data in an order that survives everything: a function of the trial's seed and the epoch, at a position.

A global batch is the next `global_batch_size` records of the epoch's order; each rank takes a contiguous share of it.
The position says how many of them are done, so that a resume, also on another number of ranks, goes on at the right
record: nothing twice, nothing left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, Protocol

import torch

from hpc_det.distributed.collectives import Distributed
from hpc_det.pytorch.data.batch_shapes import Shapes
from hpc_det.pytorch.data.data_loader import DataLoader
from hpc_det.pytorch.data.external_loader import ExternalTraining, ExternalValidation, length_of
from hpc_det.pytorch.data.micro_batches import Counted, Evaluation, MicroBatches, rounds_of
from hpc_det.pytorch.data.partition import Position
from hpc_det.pytorch.data.shared_batches import SharedTraining, SharedValidation

__all__ = [
    "Counted",
    "DataLoader",
    "Evaluation",
    "Position",
    "TorchData",
    "TrainingData",
    "ValidationData",
    "training_data",
    "validation_data",
]

ALONE = Distributed()

TorchData = dict[str, Any] | list[Any] | tuple[Any, ...] | torch.Tensor


class TrainingData(Protocol):
    """One rank's view of the training data."""

    loads_in_workers: bool
    is_shared_out: bool
    """By us: then positions are exact, and each batch takes as many of its micro batches as it has."""

    @property
    def batches_per_epoch(self) -> int | Fraction | None:
        """Not whole where the last batch of an epoch is also the first of the next. None: epochs never end."""
        ...

    def whole_batches(self, position: Position) -> int:
        """How many from `position` on are of one size and of one epoch; 0: the next one is not."""
        ...

    def after(self, position: Position, batches: int = 1) -> Position:
        """Where training is after the batch at `position`, or after some of the `whole_batches` from there."""
        ...

    def batches(self, position: Position) -> Iterator[Any]:
        """This rank's batches (micro batches, where several make one) from `position` on, without end.

        Of no use on a rank that has no loader, here and below.
        """
        ...

    def close(self) -> None:
        """Ends worker processes. May be called again, and `batches` after it."""
        ...


class ValidationData(Protocol):
    """One rank's view of the validation data."""

    loads_in_workers: bool
    length: int | None
    """Rounds of this rank; None where nobody knows."""

    def batches(self) -> Iterator[Any]:
        """This rank's share, once; over all ranks every record once. A loader of the user's own: all of it.

        Where ranks evaluate together: as many as their rounds take, see `Evaluation`.
        """
        ...

    def rounds(self, batches: Iterator[Any] | None) -> Iterator[tuple[Any, bool]]:
        """For each evaluation what it takes its batches from, which is `batches`, and whether it counts.

        `batches`: those of `batches()`; None on a rank without a loader.
        """
        ...

    def whole(self) -> Iterable[Any]:
        """All batches, not shared out."""
        ...

    def close(self) -> None:
        """Ends worker processes, also those of a pass that was abandoned."""
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
    """Collective over `gang`; `rank` and `size` are those of data parallelism.

    Without a loader the rank only counts, as those do that have one. `per_batch`: batches of the loader that make one
    of training. `same_size`: all have to be of one size, which is the user's to see to in a loader of their own.

    Raises UsageError for too few records, and where ranks do not load the same.
    """
    shapes = Shapes.gathered("training", loader, rank, gang)
    shapes.check()
    loader = shapes.stand_in(rank) if loader is None else loader
    data: TrainingData
    if isinstance(loader, DataLoader):
        data = SharedTraining(
            loader, rank=rank, size=size, seed=seed, by_its_word=not shapes.all_load, same_size=same_size
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
    """Collective over `gang`; `rank` and `size` are those of data parallelism.

    Where a rank has no loader, all evaluate equally often. `per_batch`: batches of the loader in one evaluation of a
    pipeline.

    Raises UsageError for too few records, and where ranks evaluate together and do not load the same.
    """
    shapes = Shapes.gathered("validation", loader, rank, gang)
    if evaluation is Evaluation.APART and not shapes.all_load:
        evaluation = Evaluation.TOGETHER
    if evaluation is not Evaluation.APART:
        shapes.check()
    loader = shapes.stand_in(rank) if loader is None else loader
    if not isinstance(loader, DataLoader):
        return ExternalValidation(loader, rounds_of(evaluation, length_of(loader), shapes.lengths, per_batch), size)
    data = SharedValidation(loader, rank=rank, size=size, seed=seed, evaluation=evaluation, per_batch=per_batch)
    if data.left_out and gang.is_chief:
        print(f"hpc-det: validation leaves out {data.left_out}", flush=True)
    return data
