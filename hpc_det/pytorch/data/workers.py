"""Loader processes: deaf to stop signals, ended on request, their random numbers a function of the batch alone."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import Dataset

from hpc_det.distributed.rng import mixed_seed, seed_generators
from hpc_det.errors import HpcDetError
from hpc_det.node.process import STOP_SIGNALS
from hpc_det.pytorch.data.partition import ForTorch, IndexBatches, Key

FIRST_WORD_S = 30.0
"""A worker says its first word some milliseconds after its fork; one that is silent for so long hangs in it."""
TRIES = 3


class WorkerInit:
    """Workers leave the stop signals to their rank: a dead worker would end it before it has saved."""

    def __init__(self, own: Callable[[int], None] | None) -> None:
        """`own`: the user's worker_init_fn."""
        self._own = own
        self.first_words: int | None = None
        """The end of a pipe that forked workers say their first word to."""

    def __call__(self, worker_id: int) -> None:
        if self.first_words is not None:
            os.write(self.first_words, b"1")
            os.close(self.first_words)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if self._own:
            self._own(worker_id)


def shield(loader: object) -> None:
    """The same for the workers of a torch DataLoader that is not ours."""
    if isinstance(loader, torch.utils.data.DataLoader) and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


def with_live_workers(loader: torch.utils.data.DataLoader[Any], iterate: Callable[[], Any]) -> Any:
    """What `iterate` makes, an iterator of `loader`, once more where a worker hangs in its fork.

    CPython 3.11.7, among others before 3.12, leaves a forked process in a lock that another thread held at that moment,
    as gloo's does now and then after a collective (python/cpython 112275; 1 of 5928 forks). Nobody would notice. Raises
    HpcDetError when it happens again and again.
    """
    init, has_workers = loader.worker_init_fn, loader.persistent_workers and loader._iterator is not None
    if not isinstance(init, WorkerInit) or has_workers or not _forks(loader):
        return iterate()
    for _ in range(TRIES):
        iterator, hang = _listened(init, iterate)
        if not hang:
            return iterator
        print("hpc-det: a loader process hangs in its fork; all of them are started anew", file=sys.stderr, flush=True)
        end_workers(iterator)
        loader._iterator = None
    raise HpcDetError(
        f"num_workers: {loader.num_workers} loader processes did not begin within {FIRST_WORD_S:g} s, {TRIES} times; "
        f'give the DataLoader multiprocessing_context="forkserver", or num_workers=0'
    )


def _forks(loader: torch.utils.data.DataLoader[Any]) -> bool:
    context = loader.multiprocessing_context or multiprocessing
    return loader.num_workers > 0 and context.get_start_method() == "fork"


def _listened(init: WorkerInit, iterate: Callable[[], Any]) -> tuple[Any, bool]:
    """An iterator, and whether one of its workers hangs. One that died before its first word is torch's to report.

    Workers are forked with the stop signals blocked. One that hangs in its fork still has the handlers of the rank: the
    TERM with which torch ends it would arrive at the rank, as a preemption.
    """
    listening, init.first_words = os.pipe()
    try:
        former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            iterator = iterate()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            os.close(init.first_words)
            init.first_words = None
        return iterator, _is_one_silent(listening, len(getattr(iterator, "_workers", ())))
    finally:
        os.close(listening)


def _is_one_silent(listening: int, workers: int) -> bool:
    poll, end = select.poll(), time.monotonic() + FIRST_WORD_S
    poll.register(listening, select.POLLIN)
    while workers > 0:
        if not poll.poll(max(end - time.monotonic(), 0) * 1000):
            return True
        words = os.read(listening, workers)
        if not words:  # the others have ended
            return False
        workers -= len(words)
    return False


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
        iteration = with_live_workers(self, super().__iter__)
        self._iterations.add(iteration)
        return iteration

    def close(self) -> None:
        """It can be iterated anew afterwards."""
        for iteration in list(self._iterations):
            end_workers(iteration)
        self._iterations.clear()
        self._iterator = None  # torch keeps the one with persistent workers


def rank_loader(
    dataset: Dataset[Any], batches: IndexBatches, *seed: int | str, items_are_batches: bool = False, **options: Any
) -> ClosableLoader:
    """Return a loader of one rank's batches. `options`: as torch's DataLoader takes them, `num_workers` among them.

    `seed`: what the random numbers of workers depend on, besides the key of the batch.
    """
    keyed = options["num_workers"] > 0
    return ClosableLoader(
        SeededDataset(dataset, *seed) if keyed else dataset,
        batch_sampler=ForTorch(batches, keyed=keyed, items_are_batches=items_are_batches),
        # Creating an iterator draws from it; the global one must not move for that.
        generator=torch.Generator().manual_seed(mixed_seed(*seed)),
        **options,
    )


def end_workers(iterator: Any) -> None:
    """Of torch's iterators; others have none. Workers that do not end by themselves in time are killed."""
    if not hasattr(iterator, "_shutdown_workers"):
        return
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # it is deaf to the SIGTERM that torch sends
            worker.kill()
            worker.join()
