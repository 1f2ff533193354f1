"""Worker processes of data loaders: they ignore stop signals, are restarted if they hang, and end on request."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from hpc_det.errors import HpcDetError
from hpc_det.node.process import STOP_SIGNALS

FIRST_WORD_S = 30.0
"""Seconds after which a worker counts as hung if it has not reported its start, milliseconds after its fork."""
TRIES = 3
"""Number of attempts to start the workers."""


class WorkerInit:
    """A worker_init_fn with which workers ignore stop signals and leave them to their rank."""

    # A worker that died of a signal would end its rank before the rank has saved.

    def __init__(self, own: Callable[[int], None] | None) -> None:
        """`own`: the user's worker_init_fn, called last."""
        self._own = own
        self.first_words: int | None = None
        """Write end of a pipe to which each forked worker writes one byte when it starts; None while none is forked."""

    def __call__(self, worker_id: int) -> None:
        if self.first_words is not None:
            os.write(self.first_words, b"1")
            os.close(self.first_words)
        _ignore_stops()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # inherited: `_listened` forks with them blocked
        if self._own:
            self._own(worker_id)


def _ignore_stops() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def workers_ignore_stops() -> Iterator[None]:
    """In the block, the forked workers of every torch or torchdata DataLoader ignore stop signals.

    That includes loaders which only the user's code iterates, such as those of a validation or of another trainer.
    """
    handling: Any = getattr(getattr(torch.utils.data, "_utils", None), "signal_handling", None)
    set_handlers = getattr(handling, "_set_worker_signal_handlers", None)  # both worker loops call it first
    if set_handlers is None:  # another torch: loaders that only the user's code iterates are not protected
        yield
        return

    def set_handlers_but_ignore_stops() -> None:
        set_handlers()
        _ignore_stops()

    handling._set_worker_signal_handlers = set_handlers_but_ignore_stops
    try:
        yield
    finally:
        handling._set_worker_signal_handlers = set_handlers


def shield(loader: object) -> None:
    """Make the workers of an external torch DataLoader ignore stop signals, too."""
    if isinstance(loader, torch.utils.data.DataLoader) and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


def with_live_workers(loader: torch.utils.data.DataLoader[Any], iterate: Callable[[], Any]) -> Any:
    """Return `iterate()`, an iterator of `loader`; call it again if a worker hangs in its fork.

    CPython before 3.12, 3.11.7 among others, can leave a forked process waiting for a lock that another thread held at
    that moment, as gloo's threads sometimes do after a collective (python/cpython 112275; 1 of 5928 forks). Otherwise
    the run would hang without an error. Raises HpcDetError if a worker hangs TRIES times.
    """
    init, has_workers = (
        loader.worker_init_fn,
        loader.persistent_workers and getattr(loader, "_iterator", None) is not None,
    )
    if not isinstance(init, WorkerInit) or has_workers or not _forks(loader):
        return iterate()
    for _ in range(TRIES):
        iterator, hang = _listened(init, iterate)
        if not hang:
            return iterator
        print("hpc-det: a loader process hangs in its fork; restarting all of them", file=sys.stderr, flush=True)
        end_workers(iterator)
        loader._iterator = None
    raise HpcDetError(
        f"num_workers: {loader.num_workers} loader processes did not start within {FIRST_WORD_S:g} s, {TRIES} times; "
        f'pass multiprocessing_context="forkserver" to the DataLoader, or use num_workers=0'
    )


def _forks(loader: torch.utils.data.DataLoader[Any]) -> bool:
    context = loader.multiprocessing_context or multiprocessing
    return loader.num_workers > 0 and context.get_start_method() == "fork"


def _listened(init: WorkerInit, iterate: Callable[[], Any]) -> tuple[Any, bool]:
    """Return an iterator, and whether one of its workers hangs in its fork.

    A worker that has exited already does not count: torch reports it at the next batch.
    """
    listening, init.first_words = os.pipe()
    try:
        # A worker that hangs in its fork still has the rank's signal handlers. The SIGTERM with which torch ends it
        # would reach the rank through them, as a preemption. So workers are forked with the stop signals blocked.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            iterator = iterate()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            os.close(init.first_words)  # so that the pipe ends when all workers have closed their copies
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
        if not words:  # end of the pipe: the remaining workers have exited
            return False
        workers -= len(words)
    return False


class ClosableLoader(torch.utils.data.DataLoader[Any]):
    """torch's DataLoader with workers that can be ended at any time, also those of unfinished iterations."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        self._iterations: WeakSet[Any] = WeakSet()
        super().__init__(dataset, **options)

    def __iter__(self) -> Any:
        iteration = with_live_workers(self, super().__iter__)
        self._iterations.add(iteration)
        return iteration

    def close(self) -> None:
        """End all workers. The loader can be iterated again afterwards."""
        for iteration in list(self._iterations):
            end_workers(iteration)
        self._iterations.clear()
        self._iterator = None  # torch keeps this one for persistent workers


def end_workers(iterator: Any) -> None:
    """End the workers of a torch iterator; kill those that do not exit in time. Other iterators are left unchanged."""
    if not hasattr(iterator, "_shutdown_workers") or not hasattr(iterator, "_workers"):
        return
    iterator._shutdown_workers()
    for worker in iterator._workers:
        if worker.is_alive():  # workers ignore the SIGTERM that torch sends
            worker.kill()
            worker.join()
