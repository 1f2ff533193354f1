"""Data in an order that survives everything: a pure function of the trial's seed and the epoch, at a position.

A global batch is the next `global_batch_size` records of the epoch's order; each rank takes a contiguous share of it.
The position says how many records of the epoch are done, so that a resume, also on another number of ranks, goes on at
the right record: nothing twice, nothing left out.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from hpc_det.errors import UsageError
from hpc_det.launch.signals import STOP_SIGNALS

TorchData = dict[str, Any] | list[Any] | tuple[Any, ...] | torch.Tensor


@dataclass(frozen=True)
class Position:
    """Where training is: `records` of epoch `epoch` are done."""

    epoch: int = 0
    records: int = 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """How a dataset is cut into global batches, and those into the shares of ranks."""

    length: int
    per_slot_batch: int
    size: int
    drop_last: bool = False

    @property
    def global_batch(self) -> int:
        return self.per_slot_batch * self.size

    def span(self, position: Position) -> tuple[Position, list[tuple[int, int, int]]]:
        """The position after the next global batch, and the batch: (epoch, first, end) stretches of records.

        The last batch of an epoch is shorter. Records too few to give each rank one go with the batch before them;
        after a resume on more ranks, where that one is done already, with the first batch of the next epoch.
        """
        left = self.length - position.records
        end = position.records + self.global_batch
        if self.drop_last and left < self.global_batch:
            return self.span(Position(position.epoch + 1))
        if left < self.size:
            after, stretches = self.span(Position(position.epoch + 1))
            return after, [(position.epoch, position.records, self.length), *stretches]
        if end > self.length or (0 < self.length - end < self.size and not self.drop_last):
            end = self.length
        dropped = self.drop_last and self.length - end < self.global_batch
        after = Position(position.epoch + 1) if end == self.length or dropped else Position(position.epoch, end)
        return after, [(position.epoch, position.records, end)]

    def batches_per_epoch(self) -> int:
        full, rest = divmod(self.length, self.global_batch)
        return full + (rest >= self.size and not self.drop_last)


def epoch_order(seed: int, epoch: int, length: int) -> torch.Tensor:
    """A permutation of 0 .. length-1: a function of its arguments alone, independent of every global generator."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + epoch * 0x85EBCA77) % 2**63)
    return torch.randperm(length, generator=generator)


class TrainingBatches:
    """A batch sampler: this rank's record numbers for each global batch from `position` on, without end."""

    def __init__(self, share: Share, rank: int, position: Position, seed: int | None) -> None:
        """`seed` None: records in their own order."""
        self._share = share
        self._rank = rank
        self._position = position
        self._seed = seed
        self._order: tuple[int, torch.Tensor] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        position = self._position
        while True:
            position, stretches = self._share.span(position)
            numbers = torch.cat([self._records(*stretch) for stretch in stretches])
            yield numbers.tensor_split(self._share.size)[self._rank].tolist()

    def _records(self, epoch: int, first: int, end: int) -> torch.Tensor:
        if self._seed is None:
            return torch.arange(first, end)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._seed, epoch, self._share.length))
        return self._order[1][first:end]


class DataLoader:
    """As torch's, for map-style datasets; sharding, shuffling, repeating and resuming are the loop's.

    `batch_size` is per slot. IterableDataset raises UsageError.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        prefetch_factor: int | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "DataLoader: an IterableDataset has no records to count, so a resume could not find its place; "
                "use a map-style dataset"
            )
        if batch_size < 1:
            raise UsageError(f"DataLoader: batch_size is {batch_size}; use at least 1")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": _WorkerInit(worker_init_fn),
            "prefetch_factor": prefetch_factor,
        }

    def __len__(self) -> int:
        """Batches of the whole dataset on one rank."""
        return self.share(1).batches_per_epoch()

    def share(self, size: int) -> Share:
        """Raises UsageError for fewer records than ranks."""
        length = len(self.dataset)  # type: ignore[arg-type]  # map-style datasets have a length
        share = Share(length=length, per_slot_batch=self.batch_size, size=size, drop_last=self.drop_last)
        if share.batches_per_epoch() < 1:
            raise UsageError(
                f"DataLoader: {length} records do not make one batch of {self.batch_size} per slot on {size} slots; "
                f"use fewer slots{' or drop_last=False' if self.drop_last else ''}"
            )
        return share

    def check_validation(self) -> None:
        """Raises UsageError for a dataset without records."""
        if not len(self.dataset):  # type: ignore[arg-type]
            raise UsageError("build_validation_data_loader: the dataset has no records; validation needs at least one")

    def training_batches(self, *, rank: int, size: int, position: Position, seed: int) -> Iterator[Any]:
        """This rank's batches from `position` on, without end."""
        sampler = TrainingBatches(self.share(size), rank, position, seed if self.shuffle else None)
        return iter(self._loader(sampler, seed + rank))

    def validation_batches(self, *, rank: int, size: int, seed: int) -> torch.utils.data.DataLoader[Any]:
        """This rank's batches: the r-th of every `size`, all records of the dataset exactly once over all ranks."""
        length = len(self.dataset)  # type: ignore[arg-type]
        starts = range(rank * self.batch_size, length, size * self.batch_size)
        batches = [list(range(start, min(start + self.batch_size, length))) for start in starts]
        return self._loader(batches, seed + rank)

    def _loader(self, batch_sampler: Any, seed: int) -> torch.utils.data.DataLoader[Any]:
        # A generator of its own: creating an iterator draws from it, and the global one must not move for that.
        generator = torch.Generator().manual_seed(seed)
        return torch.utils.data.DataLoader(
            self.dataset, batch_sampler=batch_sampler, generator=generator, **self._options
        )


class _WorkerInit:
    """Worker processes leave the stop signals to their rank: a dead worker would end it before it has saved."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        self._own = own

    def __call__(self, worker_id: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._own:
            self._own(worker_id)
