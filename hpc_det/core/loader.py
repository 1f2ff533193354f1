"""Passes over any loader of a user, which continue in the middle after a resume.

A resumed pass gives the records that the rest of the undisturbed pass would have given, with the same random numbers:

- The DataLoader of torch or torchdata over a map-style data set, also as prepared by accelerate, is cut by index (see
  loader_indices): no skipped record is read. With workers this needs a seed.
- Any other loader with a `state_dict`, such as torchdata's StatefulDataLoader of an iterable data set, restores its
  position itself.
- Any other iterable is started in the same state as before, and the batches that were done are read and dropped.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset

from hpc_det.core.external_loader import ExternalLoader, generators_of, length_of, samplers_of, torch_loader_of
from hpc_det.core.loader_indices import Moment, cut_sampler_of
from hpc_det.core.loader_workers import with_live_workers
from hpc_det.distributed.rng import restore_rng, rng_state, unchanged_generators


class ReplayedLoader(ExternalLoader):
    """A loader whose passes can be resumed in the middle; see the module for how.

    The state that is restored: torch's, numpy's and Python's generators, those of the loader and its samplers,
    `set_epoch`, and the loader's `state_dict`. A sampler, data set or iterator with any other state starts from its
    beginning, as does an iterator that can be iterated only once. A sampler that draws from a global generator must do
    so before its first index.
    """

    counts: ClassVar[str] = "batches"
    """The unit of a position in a pass."""

    def __init__(self, loader: Iterable[Any], *, seed: int | None = None) -> None:
        """`seed`: if given, workers seed their generators for each batch from (seed, epoch, number of the batch).

        Then random numbers of workers are the same with any number of workers, and no skipped record is read. Pass
        another seed for each rank and each loader. None: torch seeds the workers.
        """
        super().__init__(loader)
        self.generators = generators_of(loader)
        """The generators of the loader and its samplers, apart from the global ones."""
        self._reads_ahead = _is_shard_of_accelerate(loader)
        self._cut = None
        can_be_cut = self._torch_loader is not None and (self._torch_loader is loader or self._reads_ahead)
        if can_be_cut:
            assert self._torch_loader is not None
            self._cut = cut_sampler_of(self._torch_loader, seed)
        self._stateful = None if self._cut is not None else _stateful(loader)
        self._began: dict[str, Any] = {}
        self._pass = _Pass(iter(()), 0)

    @property
    def reads_ahead(self) -> bool:
        """Whether this process reads a batch before it is asked for, as accelerate's loader does."""
        return self._reads_ahead and not self.loads_in_workers

    # --- passes

    def begin(self, epoch: int) -> Iterator[Any]:
        """Return an iterator of pass number `epoch`, and record the state in which it is started; see `began`."""
        self.finish()
        self._prepare(epoch)
        return self._iterate(epoch)

    def resume(
        self, epoch: int, done: int, began: dict[str, Any] | None, rng: dict[str, Any] | None = None
    ) -> Iterator[Any]:
        """Return an iterator of pass number `epoch` after `done` batches.

        `began`: what `began()` returned when the position was saved; None if it is unknown. `rng`: the `rng_state()`
        of that moment, in which the global generators continue; None: they are left as they are.
        """
        then = rng_state() if rng is None else rng
        if began:
            restore_rng(began["rng"])
            self.restore_generators(began["generators"])
        # accelerate's loader reads batches `done` and `done` + 1 at once. When the position was saved, it had read the
        # first of them.
        is_ahead = rng is not None and done > 0 and self.reads_ahead
        moment = (done + 1, then) if is_ahead and self._cut is not None else None
        iterator = self._resumed(epoch, done, began or {}, moment)
        self.finish()  # what a sampler draws at the end of a pass is in `now` already
        if began and not (self._reads_ahead and self._cut is not None):  # then they are a step further already
            self.restore_generators(began.get("now", ()))
        if moment is None:
            restore_rng(then)
        return iterator

    def _resumed(self, epoch: int, done: int, began: dict[str, Any], moment: Moment | None) -> Iterator[Any]:
        if self._stateful is not None and began.get("loader") is not None:
            self._prepare(epoch, starts_workers=False)
            self._stateful.load_state_dict(began["loader"])
            with self._workers_started_already(epoch):
                return self._iterate(epoch, done)
        self._prepare(epoch)
        if self._cut is not None:
            return self._iterate(epoch, done, moment)
        iterator = self._iterate(epoch)
        deque(islice(iterator, done), maxlen=0)
        return iterator

    def _prepare(self, epoch: int, *, starts_workers: bool = True) -> None:
        for owner in (self._loader, *samplers_of(self._loader)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        if getattr(self._torch_loader, "_initial_iter_for_state_dict", False):
            # A StatefulDataLoader asked for its state before its first pass, as accelerate does, has made an iterator,
            # and would draw nothing in this pass, whichever it is.
            self._torch_loader.load_state_dict({})  # type: ignore[union-attr]
        if epoch and starts_workers:
            self._start_workers()
        self._began = {"rng": rng_state(), "generators": self.generator_states()}

    def _start_workers(self) -> None:
        """Start persistent workers before the pass, without changing any generator."""
        # torch draws a seed for persistent workers in their first pass only. A resumed pass that is not the first one
        # must not draw it.
        loader = self._torch_loader
        if loader is None or not loader.persistent_workers or getattr(loader, "_iterator", None) is not None:
            return
        states = self.generator_states()
        begin = functools.partial(with_live_workers, loader, functools.partial(iter, loader))
        with unchanged_generators():
            if self._cut is not None:
                with self._cut.installed_empty():
                    begin()
            else:
                begin()
        self.restore_generators(states)

    @contextmanager
    def _workers_started_already(self, epoch: int) -> Iterator[None]:
        """Draw no seed for persistent workers from a generator in use, if this is not their first pass."""
        loader = self._torch_loader
        if loader is None or not loader.persistent_workers or not epoch:
            yield
            return
        own, loader.generator = loader.generator, torch.Generator()
        try:
            yield
        finally:
            loader.generator = own

    def _iterate(self, epoch: int, done: int = 0, moment: Moment | None = None) -> Iterator[Any]:
        if self._cut is not None:
            with self._cut.installed(epoch, done, moment):
                iterator = self._started()
            self._cut.start()
        else:
            iterator = self._started()
        self._pass = _Pass(iterator, done)
        return self._pass

    def _started(self) -> Iterator[Any]:
        iterator = self._begin()
        return _with_first_read(iterator) if self._reads_ahead else iterator

    # --- state

    def began(self) -> dict[str, Any]:
        """Return the state for `resume` of the open pass, in a form for torch.save.

        It contains the states of the generators in which the pass was started, those of the loader's generators now,
        and the loader's `state()`.
        """
        state = self.state()
        return {**self._began, "now": self.generator_states(), **({} if state is None else {"loader": state})}

    def state(self) -> dict[str, Any] | None:
        """Return the loader's `state_dict()` in the middle of a pass; None at its border, or if it is not needed."""
        # A StatefulDataLoader with the state of the end of a pass makes the next pass empty (meta-pytorch/data 1437).
        if self._stateful is None or not self._pass.is_open or self.left(self._pass.done) == 0:
            return None
        state: dict[str, Any] = self._stateful.state_dict()
        return state

    def generator_states(self) -> list[torch.Tensor]:
        """Return the states of `generators`. At the border of two passes they are all that a loader needs to save."""
        self.finish()
        return [generator.get_state() for generator in self.generators]

    def restore_generators(self, states: Iterable[torch.Tensor]) -> None:
        """Set `generators` to states from `generator_states()`."""
        for generator, state in zip(self.generators, states, strict=False):
            generator.set_state(state)

    def finish(self) -> None:
        """End the open pass if all of its batches are done.

        At its end a sampler of torch may draw from its generator once more, as RandomSampler does. Other iterables are
        not asked for their end, because they may have more batches than their length says.
        """
        if self._torch_loader is None or self._reads_ahead or not self._pass.is_open:
            return
        if self.left(self._pass.done) == 0:
            self._pass.finish()

    def after(self, done: int) -> int:
        """Return the number of batches that are done after the next one."""
        return done + 1

    def left(self, done: int) -> int | None:
        """Return the number of batches left; None if it is unknown."""
        # torch treats the length of an IterableDataset as a guess, and so does this.
        if isinstance(getattr(self._loader, "dataset", None), IterableDataset):
            return None
        length = length_of(self._loader)
        return None if length is None else max(length - done, 0)


class _Pass:
    """An iterator over the batches of a pass, which counts them."""

    def __init__(self, batches: Iterator[Any], done: int) -> None:
        self._batches = batches
        self.done = done
        self._has_ended = False
        self._next: list[Any] = []
        """The next batch, if the pass has one more than its length says."""

    @property
    def is_open(self) -> bool:
        """Whether it has given a batch, and its end has not been reached."""
        return self.done > 0 and not self._has_ended

    def finish(self) -> None:
        """Reach the end now, after the last batch."""
        if not self._next:
            self._next = list(islice(self._batches, 1))
            self._has_ended = not self._next

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        try:
            batch = self._next.pop() if self._next else next(self._batches)
        except StopIteration:
            self._has_ended = True
            raise
        self.done += 1
        return batch


def _with_first_read(batches: Iterator[Any]) -> Iterator[Any]:
    """Read the first batch now, and return an iterator over all batches."""
    first = list(islice(batches, 1))
    return _after_first(first, batches)


def _after_first(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    if first:
        yield first.pop()
        yield from rest


def _is_shard_of_accelerate(loader: object) -> bool:
    """Return whether `loader` is what accelerate makes of a DataLoader: a generator that reads one batch ahead."""
    # type(), because its __class__ is that of the loader inside
    return type(loader).__name__ == "DataLoaderShard" and not getattr(loader, "skip_batches", 0)


def _stateful(loader: object) -> Any:
    """Return `loader` if it can save and restore its position itself, else None."""
    inner = torch_loader_of(loader)
    owner = loader if inner is None else inner  # a loader of accelerate has the methods, also if the inner has none
    can = all(callable(getattr(owner, name, None)) for name in ("state_dict", "load_state_dict"))
    return loader if can else None
