"""The torch loader of one rank's batches, whose worker processes seed their generators for each batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from hpc_det.core.loader_workers import ClosableLoader
from hpc_det.distributed.rng import mixed_seed, seed_generators
from hpc_det.pytorch.data.partition import ForTorch, IndexBatches, Key


class SeededDataset(Dataset[Any]):
    """The user's data set in a worker; seeds Python's, numpy's and torch's generators before each batch.

    So random augmentation, of records and in collate_fn, is the same after a resume and with any number of workers.
    Attributes are those of the user's data set, also when a worker_init_fn sets them.
    """

    def __init__(self, dataset: Dataset[Any], *seed: int | str) -> None:
        # vars(), because __setattr__ forwards to the user's data set
        vars(self).update(_seeded_dataset=dataset, _seed_of_batches=seed)

    def __getitems__(self, keyed: tuple[Key, Any]) -> Any:
        """Return the records of a batch. torch's fetcher passes what the batch sampler yields."""
        key, indices = keyed
        seed_generators(mixed_seed(*self._seed_of_batches, *key))
        fetch = getattr(self._seeded_dataset, "__getitems__", None)
        return fetch(indices) if fetch else [self._seeded_dataset[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        return self._seeded_dataset[index]

    def __len__(self) -> int:
        return len(self._seeded_dataset)

    def __getattr__(self, name: str) -> Any:
        # During unpickling there is no data set yet, and pickle's own attributes (__getstate__) are not the data set's.
        if name.startswith("__") or name == "_seeded_dataset":
            raise AttributeError(name)
        return getattr(self._seeded_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seeded_dataset, name, value)


def rank_loader(
    dataset: Dataset[Any], batches: IndexBatches, *seed: int | str, items_are_batches: bool = False, **options: Any
) -> ClosableLoader:
    """Return a loader of one rank's batches. `options`: those of torch's DataLoader, including `num_workers`.

    `seed` and the key of a batch determine the random numbers that workers draw for it.
    """
    keyed = options["num_workers"] > 0
    return ClosableLoader(
        SeededDataset(dataset, *seed) if keyed else dataset,
        batch_sampler=ForTorch(batches, keyed=keyed, items_are_batches=items_are_batches),
        # Creating an iterator draws from its generator; the global one must not be used for that.
        generator=torch.Generator().manual_seed(mixed_seed(*seed)),
        **options,
    )
