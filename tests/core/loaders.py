"""Loaders of every kind with passes of six batches, and runs over them that are stopped and resumed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from hpc_det.core.loader import ReplayedLoader
from hpc_det.distributed.rng import restore_rng, rng_state, seed_everything

BATCHES = 6
PASSES = 3
POSITIONS = [(epoch, done) for epoch in range(PASSES) for done in range(1, BATCHES + 1)]
"""Every (pass, batches done) at which a run can be stopped; the last one of a pass is its border."""

Make = Callable[[], Any]
"""Makes a loader in the state in which a new process has it."""


# --- data


class Numbers(Dataset[Any]):
    """Each record is its index. `read` lists the records that this process has read."""

    def __init__(self, length: int = 2 * BATCHES) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return index


class Noisy(Numbers):
    """Each record contains a random number of each generator, as random augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), *draws()


class Stream(IterableDataset[Any]):
    """Twelve records with a random number of torch; with workers each record comes from each of them."""

    def __init__(self, length: int = 2 * BATCHES) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            yield number, float(torch.rand(()))


class Permuted:
    """A loader that is no DataLoader: its order depends on `set_epoch`, and it draws as it goes."""

    def __init__(self) -> None:
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in np.random.default_rng(self._epoch).permutation(BATCHES):
            yield int(number), random.random()


def draws() -> tuple[float, float, float]:
    """Return a number of each generator, as dropout draws them."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


# --- loaders over a map-style data set; `data` is Numbers or Noisy


def in_order(data: type[Numbers], **options: Any) -> Any:
    return DataLoader(data(), batch_size=2, **options)


def shuffled(data: type[Numbers], **options: Any) -> Any:
    return DataLoader(data(), batch_size=2, shuffle=True, **options)


def with_a_generator(data: type[Numbers], **options: Any) -> Any:
    return DataLoader(data(), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def with_a_sampler_that_draws_as_it_goes(data: type[Numbers], **options: Any) -> Any:
    records = data(72)
    sampler = RandomSampler(records, replacement=True, generator=torch.Generator().manual_seed(3))
    return DataLoader(records, batch_size=12, sampler=sampler, **options)


def weighted(data: type[Numbers], **options: Any) -> Any:
    return DataLoader(data(), batch_size=2, sampler=WeightedRandomSampler([1.0, 3.0] * BATCHES, 12), **options)


def with_a_batch_sampler(data: type[Numbers], **options: Any) -> Any:
    records = data()
    return DataLoader(records, batch_sampler=BatchSampler(RandomSampler(records), 2, False), **options)


def without_batches(data: type[Numbers], **options: Any) -> Any:
    return DataLoader(data(BATCHES), batch_size=None, shuffle=True, **options)


def of_rank_1(data: type[Numbers], **options: Any) -> Any:
    records = data(4 * BATCHES)
    sampler: DistributedSampler[Any] = DistributedSampler(records, num_replicas=2, rank=1)
    return DataLoader(records, batch_size=2, sampler=sampler, **options)


def listed_indices(data: type[Numbers], **options: Any) -> Any:
    return DataLoader(data(), batch_size=2, sampler=list(reversed(range(12))), **options)


MAP_STYLE = [
    in_order,
    shuffled,
    with_a_generator,
    with_a_sampler_that_draws_as_it_goes,
    weighted,
    with_a_batch_sampler,
    without_batches,
    of_rank_1,
    listed_indices,
]


# --- other loaders


def streamed(**options: Any) -> Any:
    return DataLoader(Stream(), batch_size=2, **options)


def a_list() -> list[int]:
    return list(range(BATCHES))


def permuted() -> Any:
    return Permuted()


class Doubled(DataLoader[Any]):
    """A DataLoader with an `__iter__` of its own."""

    def __iter__(self) -> Any:
        return ([batch, batch] for batch in super().__iter__())


def with_its_own_iteration() -> Any:
    return Doubled(Noisy(), batch_size=2, sampler=SequentialSampler(range(12)))


OTHERS: list[Make] = [streamed, a_list, permuted, with_its_own_iteration]


# --- runs


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a training loop saves after a step."""

    epoch: int
    done: int
    rng: dict[str, Any]
    generators: list[torch.Tensor]
    began: dict[str, Any] | None
    """None at the border of a pass."""


Step = tuple[Any, tuple[float, float, float]]
"""A batch, and the numbers that the loop drew after it."""


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def undisturbed(
    make: Make, *, passes: int = PASSES, at: list[tuple[int, int]] = POSITIONS, **options: Any
) -> tuple[list[Step], list[Saved]]:
    """Return the steps of all passes, and what was saved at the positions `at`."""
    seed_everything(7)
    steps: list[Step] = []
    saved: list[Saved] = []
    with closing(ReplayedLoader(make(), **options)) as loader:
        for epoch in range(passes):
            for done, batch in enumerate(loader.begin(epoch), 1):
                steps.append((plain(batch), draws()))
                if (epoch, done) in at:
                    saved += save(loader, epoch, done)
    assert len(steps) == passes * BATCHES
    return steps, saved


def save(loader: ReplayedLoader, epoch: int, done: int) -> list[Saved]:
    """Return what is saved in an open pass; after its last batch, also what is saved at the border."""
    open_pass = Saved(
        epoch=epoch, done=done, rng=rng_state(), began=loader.began(), generators=loader.generator_states()
    )
    return [open_pass, replace(open_pass, began=None)] if done == BATCHES else [open_pass]


def resumed(make: Make, saved: Saved, *, passes: int = PASSES, **options: Any) -> list[Step]:
    """Return the steps of a new process that continues where `saved` was saved."""
    seed_everything(8)
    with closing(ReplayedLoader(make(), **options)) as loader:
        batches, epoch = continued(loader, saved), saved.epoch + (saved.began is None)
        steps: list[Step] = []
        while epoch < passes:
            steps += [(plain(batch), draws()) for batch in batches]
            epoch += 1
            batches = loader.begin(epoch) if epoch < passes else batches
    return steps


def continued(loader: ReplayedLoader, saved: Saved) -> Iterator[Any]:
    if saved.began is not None:
        return loader.resume(saved.epoch, saved.done, saved.began, saved.rng)
    restore_rng(saved.rng)
    loader.restore_generators(saved.generators)
    return loader.begin(saved.epoch + 1)


def differing(make: Make, *, passes: int = PASSES, at: list[tuple[int, int]] = POSITIONS, **options: Any) -> list[Any]:
    """Return the positions after which a resumed run differs from the undisturbed one."""
    steps, all_saved = undisturbed(make, passes=passes, at=at, **options)
    return [
        (saved.epoch, saved.done)
        for saved in all_saved
        if resumed(make, saved, passes=passes, **options) != steps[saved.epoch * BATCHES + saved.done :]
    ]
