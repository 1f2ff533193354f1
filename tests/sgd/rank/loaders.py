"""Data whose samples are their indices, and the passes of ranks over it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpc_det.sgd.rank import RankPlace, RankSettings
from hpc_det.sgd.rank.passes import Passes, training_source, validation_source


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Noisy(Numbers):
    """Each sample contains a random number of each generator."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.random()), float(torch.rand(()))


class Seeds(Numbers):
    """Each sample is the seed of the process that loads it, and a random number of torch."""

    def __getitem__(self, index: int) -> Any:
        return torch.utils.data.get_worker_info().seed, torch.rand(())  # type: ignore[union-attr]


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def passes(
    loader: Iterable[Any], rank: int = 0, size: int = 1, num_workers: int = 1, exact: bool = False, share: bool = True
) -> Passes:
    settings = RankSettings(operator_cls=object, config={}, num_workers=num_workers, add_dist_sampler=share)
    source = validation_source if exact else training_source
    return Passes(lambda loader: source(loader, settings, RankPlace(rank, rank, size))).over(loader)


def gang(size: int, length: int, *, batch_size: int = 2, exact: bool = False, **options: Any) -> list[Passes]:
    """Return the passes of all ranks, each with a separate loader."""
    return [
        passes(DataLoader(Numbers(length), batch_size=batch_size, **options), rank, size, 8, exact)
        for rank in range(size)
    ]


def taken(ranks: list[Passes], num_steps: int | None = None) -> list[list[list[int]]]:
    """Return the next batches of each rank, by rank."""
    return [[batch.tolist() for batch in rank.batches(num_steps)] for rank in ranks]


def flat(nested: Any) -> list[int]:
    return [number for part in nested for number in flat(part)] if isinstance(nested, list) else [nested]


def handed_over(before: list[Passes], after: list[Passes]) -> None:
    """Restore a snapshot of some ranks on the same or another number of ranks."""
    position, owns = before[0].position(), [rank.own() for rank in before]
    for number, rank in enumerate(after):
        rank.restore(position, owns[number] if number < len(owns) else None)
