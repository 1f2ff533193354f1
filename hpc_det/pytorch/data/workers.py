"""Loader processes: deaf to stop signals, ended on request, their random numbers a function of the batch alone."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset

from hpc_det.launch.signals import STOP_SIGNALS
from hpc_det.pytorch.data.index_batches import Key
from hpc_det.pytorch.data.seeds import mixed_seed, seed_generators


class WorkerInit:
    """Workers leave the stop signals to their rank: a dead worker would end it before it has saved."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        """`own`: the user's worker_init_fn."""
        self._own = own

    def __call__(self, worker_id: int) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._own:
            self._own(worker_id)


def shield(loader: object) -> None:
    """The same for the workers of a torch DataLoader that is not ours."""
    if isinstance(loader, torch.utils.data.DataLoader) and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


class SeededDataset(Dataset[Any]):
    """The user's dataset in a worker, which seeds Python's, numpy's and torch's generators before each batch.

    So random augmentation, of records and in collate_fn, is the same after a resume and with any number of workers.
    Attributes are those of the user's dataset, also for a worker_init_fn that sets some.
    """

    def __init__(self, dataset: Dataset[Any], *seed: int | str) -> None:
        vars(self).update(_seeded_dataset=dataset, _seed_of_batches=seed)

    def __getitems__(self, keyed: tuple[Key, Any]) -> Any:
        """torch's fetcher hands over what the batch sampler yields."""
        key, indices = keyed
        seed_generators(mixed_seed(*self._seed_of_batches, *key))
        fetch = getattr(self._seeded_dataset, "__getitems__", None)
        return fetch(indices) if fetch else [self._seeded_dataset[index] for index in indices]

    def __getitem__(self, index: Any) -> Any:
        return self._seeded_dataset[index]

    def __len__(self) -> int:
        return len(self._seeded_dataset)

    def __getattr__(self, name: str) -> Any:
        # While it is unpickled there is no dataset yet; what pickle asks for (__getstate__) is not the dataset's.
        if name.startswith("__") or name == "_seeded_dataset":
            raise AttributeError(name)
        return getattr(self._seeded_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seeded_dataset, name, value)


class ClosableLoader(torch.utils.data.DataLoader[Any]):
    """torch's, whose workers can be ended at any time, also of iterations that were left half-way."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        self._iterations: WeakSet[Any] = WeakSet()
        super().__init__(dataset, **options)

    def __iter__(self) -> Any:
        iteration = super().__iter__()
        self._iterations.add(iteration)
        return iteration

    def close(self) -> None:
        """It can be iterated anew afterwards."""
        for iteration in list(self._iterations):
            end_workers(iteration)
        self._iterations.clear()
        self._iterator = None  # torch keeps the one with persistent workers


def end_workers(iterator: Any) -> None:
    """Of torch's iterators; others have none. Workers that do not end by themselves in time are killed."""
    if not hasattr(iterator, "_shutdown_workers"):
        return
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # it is deaf to the SIGTERM that torch sends
            worker.kill()
            worker.join()
