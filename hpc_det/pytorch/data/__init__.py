"""One rank's data in an order that survives everything: a function of the trial's seed and the epoch, at a position.

A global batch is the next `global_batch_size` records of the epoch's order; each rank takes a contiguous share of it.
The position says how many of them are done, so that a resume, also on another number of ranks, goes on at the right
record: nothing twice, nothing left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from hpc_det.errors import UsageError
from hpc_det.pytorch.data.data_loader import DataLoader
from hpc_det.pytorch.data.foreign import ForeignTraining, ForeignValidation, length_of
from hpc_det.pytorch.data.index_batches import OnePass, TrainingBatches
from hpc_det.pytorch.data.shares import Position
from hpc_det.pytorch.data.workers import ClosableLoader

__all__ = [
    "DataLoader",
    "Position",
    "TorchData",
    "TrainingData",
    "ValidationData",
    "length_of",
    "training_data",
    "validation_data",
]

TorchData = dict[str, Any] | list[Any] | tuple[Any, ...] | torch.Tensor


class TrainingData(Protocol):
    """One rank's view of the training data."""

    loads_in_workers: bool

    @property
    def batches_per_epoch(self) -> int | None:
        """None: it has no length, and epochs never end."""
        ...

    def whole_batches(self, position: Position) -> int:
        """How many from `position` on are of one size and of one epoch; 0: the next one is not."""
        ...

    def after(self, position: Position, batches: int = 1) -> Position:
        """Where training is after the batch at `position`, or after some of the `whole_batches` from there."""
        ...

    def batches(self, position: Position) -> Iterator[Any]:
        """This rank's batches from `position` on, without end."""
        ...

    def close(self) -> None:
        """Ends worker processes. May be called again, and `batches` after it."""
        ...


class ValidationData(Protocol):
    """One rank's view of the validation data."""

    loads_in_workers: bool
    length: int | None
    """Batches of this rank's share; None where nobody knows."""

    def batches(self) -> Iterator[Any]:
        """This rank's share, once; over all ranks every record once. A loader of the user's own: all of it."""
        ...

    def whole(self) -> Iterable[Any]:
        """All batches, not shared out."""
        ...

    def close(self) -> None:
        """Ends worker processes, also those of a pass that was abandoned."""
        ...


def training_data(
    loader: DataLoader | Iterable[Any], *, rank: int, size: int, seed: int, batches_per_epoch: int | None = None
) -> TrainingData:
    """`batches_per_epoch`: of a loader that is not ours, where it is known better than by its len().

    Raises UsageError for fewer records than ranks.
    """
    if isinstance(loader, DataLoader):
        return SharedTraining(loader, rank=rank, size=size, seed=seed)
    return ForeignTraining(loader, batches_per_epoch)


def validation_data(loader: DataLoader | Iterable[Any], *, rank: int, size: int, seed: int) -> ValidationData:
    """Raises UsageError for no records."""
    if isinstance(loader, DataLoader):
        return SharedValidation(loader, rank=rank, size=size, seed=seed)
    return ForeignValidation(loader, size)


class SharedTraining:
    def __init__(self, loader: DataLoader, *, rank: int, size: int, seed: int) -> None:
        self._loader = loader
        self._rank = rank
        self._seed = seed
        self._items = loader.items(seed)
        self._share = loader.share(self._items, size)
        self._share.check(self._items.nominal_length)
        self._torch_loader: ClosableLoader | None = None
        self.batches_per_epoch = self._share.batches_per_epoch(self._items.nominal_length)
        self.loads_in_workers = loader.num_workers > 0

    def whole_batches(self, position: Position) -> int:
        return self._share.whole_batches(position)

    def after(self, position: Position, batches: int = 1) -> Position:
        return self._share.after(position) if batches == 1 else self._share.after_whole(position, batches)

    def batches(self, position: Position) -> Iterator[Any]:
        """Raises UsageError for a position that the epoch does not have."""
        length = self._items.length(position.epoch)
        if position.done >= length:
            raise UsageError(
                f"build_training_data_loader: epoch {position.epoch} has {length} {self._items.name}, of which the "
                f"checkpoint has trained {position.done}; resume with the data that it was trained on"
            )
        self.close()
        batches = TrainingBatches(self._share, rank=self._rank, position=position)
        self._torch_loader = self._loader.torch_loader(batches, "training", self._seed, self._rank)
        return iter(self._torch_loader)

    def close(self) -> None:
        if self._torch_loader is not None:
            self._torch_loader.close()


class SharedValidation:
    def __init__(self, loader: DataLoader, *, rank: int, size: int, seed: int) -> None:
        items = loader.items(seed)
        if not items.nominal_length:
            raise UsageError(f"build_validation_data_loader: there are no {items.name}; validation needs at least one")
        share = OnePass(items, per_slot=loader.batch_size, rank=rank, size=size)
        whole = OnePass(items, per_slot=loader.batch_size, rank=0, size=1)
        self.length: int | None = len(share)
        self._share = loader.torch_loader(share, "validation", seed)
        self._whole = loader.torch_loader(whole, "validation", seed)
        self.loads_in_workers = loader.num_workers > 0

    def batches(self) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._share)
        return iterator

    def whole(self) -> Iterable[Any]:
        return self._whole

    def close(self) -> None:
        self._share.close()
        self._whole.close()
