"""hpc_det's DataLoader: the data set, batch size and order that a user asks for, before it is divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from hpc_det.core.external_loader import length_of
from hpc_det.core.loader_workers import ClosableLoader, WorkerInit
from hpc_det.core.progress import Position
from hpc_det.errors import UsageError, count
from hpc_det.pytorch.data.order import Drawn, Items, Records
from hpc_det.pytorch.data.partition import IndexBatches, OnePass, Rest, Share, TrainingBatches
from hpc_det.pytorch.data.workers import rank_loader


class DataLoader:
    """A DataLoader like torch's, for map-style data sets; the loop shards, shuffles, repeats and resumes.

    `batch_size` is per slot. The order of an epoch is a function of the trial's seed and the epoch alone. This includes
    a `sampler` or `batch_sampler`: it is iterated with the global generators seeded for the epoch and restored
    afterwards. A batch of a `batch_sampler` goes to one rank as a whole. Numbers that workers draw from the global
    generators, for example for random augmentation, are the same after a resume and with any number of workers. Memory
    is pinned if there is a GPU, unless `pin_memory` is False.

    Outside the loop, `iter` and `len` behave like those of torch's loader with the same arguments; only there
    `generator` is used.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        """Raises UsageError for an IterableDataset, for batch_size=None, and where torch would raise ValueError."""
        problems = [*_problems_of_data(dataset, batch_size, batch_sampler), *_problems_of_order(sampler, shuffle)]
        if batch_sampler is not None:
            problems += _problems_of_batches(batch_size, shuffle, sampler, drop_last)
        if problems:
            raise UsageError([f"DataLoader: {problem}" for problem in problems])
        self.dataset = dataset
        self.batch_size = batch_size or 1
        """Items of one rank in a batch: records, or with a batch_sampler one of its batches."""
        self.shuffle = shuffle
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.drop_last = drop_last
        self.generator = generator
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory is not False and torch.cuda.is_available(),
            "timeout": timeout if num_workers else 0,  # torch rejects a timeout without workers
            "worker_init_fn": WorkerInit(worker_init_fn),
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        self._local: torch.utils.data.DataLoader[Any] | None = None
        try:
            # Made only to raise torch's own errors now, in the user's __init__ call, and not when training begins.
            torch.utils.data.DataLoader(dataset, batch_sampler=[], **self._options)
        except ValueError as error:
            raise UsageError(f"DataLoader: {error}") from None

    def __len__(self) -> int:
        """Return the number of batches of the whole data set, as if on one rank."""
        items = self.items(seed=0)
        return self.share(items, size=1).batches_per_epoch(items.nominal_length)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of one pass over the whole data set, as torch's loader does."""
        if self._local is None:
            self._local = torch.utils.data.DataLoader(
                self.dataset,
                batch_size=self.batch_size,
                shuffle=self.shuffle,
                sampler=self.sampler,
                batch_sampler=self.batch_sampler,
                drop_last=self.drop_last,
                generator=self.generator,
                **self._options,
            )
        return iter(self._local)

    def get_data_loader(
        self, repeat: bool = False, skip: int = 0, num_replicas: int = 1, rank: int = 0, *, seed: int = 0
    ) -> torch.utils.data.DataLoader[Any]:
        """Return a torch loader of one rank's batches after `skip` global batches; `repeat`: endlessly, as in training.

        The order is that of a trial with this seed; without `repeat` always that of its first epoch.
        """
        items = self.items(seed)
        if not repeat:
            once = OnePass(
                items, per_slot=self.batch_size, rank=rank, size=num_replicas, skip=skip, drop_last=self.drop_last
            )
            return self.torch_loader(once, "validation", seed)
        share, position = self.share(items, num_replicas), Position()
        for _ in range(skip):
            position = share.after(position)
        return self.torch_loader(TrainingBatches(share, rank=rank, position=position), "training", seed, rank)

    # --- for training and validation

    def items(self, seed: int) -> Items:
        """Return the items of all epochs in their order. Raises UsageError if the sampler or data set has no length."""
        if self.batch_sampler is not None:
            return Drawn("batches", _with_length(self.batch_sampler), seed)
        if self.sampler is not None:
            return Drawn("records", _with_length(self.sampler), seed)
        return Records(len(_with_length(self.dataset)), seed if self.shuffle else None)

    def share(self, items: Items, size: int) -> Share:
        """Return how training divides the items among `size` ranks."""
        rest = Rest.DROPPED if self.drop_last else Rest.SHORT
        if self.batch_sampler is not None:
            rest = Rest.FILLED  # whole batches of the sampler cannot be made shorter
        return Share(items, per_slot=self.batch_size, size=size, rest=rest)

    def torch_loader(self, batches: IndexBatches, *seed: int | str) -> ClosableLoader:
        """Return a loader of `batches`. `seed` and the key of a batch determine the random numbers of its workers."""
        return rank_loader(
            self.dataset, batches, *seed, items_are_batches=self.batch_sampler is not None, **self._options
        )


OWN_LOADER = (
    "return torch's DataLoader or a loader of your own from build_training_data_loader, after "
    "context.experimental.disable_dataset_reproducibility_checks() in the trial's __init__"
)


def _problems_of_data(dataset: Any, batch_size: int | None, batch_sampler: Any) -> Iterator[str]:
    if isinstance(dataset, IterableDataset):
        yield (
            "an IterableDataset has no records to count, so a resumed run could not find its position; "
            f"use a map-style dataset, or {OWN_LOADER}"
        )
    if batch_size is None and batch_sampler is None:
        yield f"batch_size is None, but training counts batches; use at least 1, or {OWN_LOADER}"
    if batch_size is not None and batch_size < 1:
        yield f"batch_size is {batch_size}; use at least 1"


def _problems_of_order(sampler: Any, shuffle: bool) -> Iterator[str]:
    if sampler is not None and shuffle:
        yield "a sampler and shuffle=True both set the order; remove one of them"
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        yield (
            f"the sampler divides the records among {count(sampler.num_replicas, 'rank')}, which training does itself; "
            f"remove it, or pass a sampler of all records"
        )


def _problems_of_batches(batch_size: int | None, shuffle: bool, sampler: Any, drop_last: bool) -> Iterator[str]:
    """Yield the problems of arguments that conflict with a batch sampler."""
    others = {
        f"batch_size={batch_size}": batch_size != 1,
        "shuffle=True": shuffle,
        "sampler": sampler is not None,
        "drop_last=True": drop_last,
    }
    if given := [name for name, is_given in others.items() if is_given]:
        yield f"a batch_sampler makes the batches, and so would {', '.join(given)}; remove one of them"


def _with_length(sized: Any) -> Any:
    if length_of(sized) is None:
        raise UsageError(
            f"DataLoader: {type(sized).__name__} has no len(), so the end of an epoch is unknown; give it a __len__"
        )
    return sized
