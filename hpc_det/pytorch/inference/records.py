"""The records of a data set, shared among the ranks of a batch inference.

A position counts records of the whole data set, so any number of ranks can continue there. In each round every rank has
one batch, in the order of ranks; in the last round the last batch may be smaller, and some ranks may have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hpc_det.core.loader import ReplayedLoader
from hpc_det.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a round."""

    first: int
    """Number of the first record of this rank's batch."""
    count: int
    """Records of this rank's batch; 0: it has none."""
    batch: Any
    done: int
    """Number of records that are done after the round, on all ranks together."""
    batches: int
    """Number of batches in the round, on all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """A data set, and how one rank reads it."""

    dataset: Dataset[Any]
    batch_size: int
    options: Mapping[str, Any]
    """Further arguments of torch's DataLoader."""
    length: int | None
    """Number of records; None: unknown before the end, as of an IterableDataset."""
    rank: int = 0
    size: int = 1

    def rounds(self, done: int, end: int | None) -> Generator[Share, None, None]:
        """Yield this rank's part of each round from record `done` on, up to record `end`, or all records for None."""
        if self.length is None:
            return self._of_stream(done, end)
        return self._of_map(done, self.length if end is None else min(end, self.length))

    def batches(self, done: int, end: int) -> int:
        """Return the number of batches of all ranks from record `done` up to `end`."""
        return math.ceil(max(end - done, 0) / self.batch_size)

    def _of_map(self, done: int, end: int) -> Generator[Share, None, None]:
        step = self.batch_size * self.size
        own = range(done + self.rank * self.batch_size, end, step)
        loader = DataLoader(self.dataset, batch_sampler=_Batches(own, self.batch_size, end), **self.options)
        loaded = _iterated(loader) if own else iter(())
        for began in range(done, end, step):
            first, ended = began + self.rank * self.batch_size, min(began + step, end)
            yield Share(
                first=first,
                count=max(min(self.batch_size, end - first), 0),
                batch=next(loaded) if first < end else None,
                done=ended,
                batches=self.batches(began, ended),
            )

    def _of_stream(self, done: int, end: int | None) -> Generator[Share, None, None]:
        options = dict(self.options)
        collate = partial(_collated, options.pop("collate_fn", None) or default_collate)
        stream = _Stream(cast(IterableDataset[Any], self.dataset), self, done, end)
        for first, count, batch, ended, batches in _iterated(
            DataLoader(stream, batch_size=None, collate_fn=collate, **options)
        ):
            yield Share(first=first, count=count, batch=batch, done=ended, batches=batches)


class _Batches:
    """The batch sampler of one rank: the batches that start at the given records, and end at `end`."""

    def __init__(self, starts: range, batch_size: int, end: int) -> None:
        self._starts, self._batch_size, self._end = starts, batch_size, end

    def __iter__(self) -> Iterator[list[int]]:
        for first in self._starts:
            yield list(range(first, min(first + self._batch_size, self._end)))

    def __len__(self) -> int:
        return len(self._starts)


class _Stream(IterableDataset[Any]):
    """The rounds of one rank over a data set without a length: each rank reads all records and keeps its own."""

    def __init__(self, dataset: IterableDataset[Any], records: Records, done: int, end: int | None) -> None:
        self._dataset = dataset
        self._batch_size, self._rank, self._size = records.batch_size, records.rank, records.size
        self._done, self._end = done, end

    def __iter__(self) -> Iterator[tuple[int, list[Any], int, int]]:
        """Yield of each round: this rank's first record, its records, the records done, the batches of all ranks."""
        size = self._batch_size
        own: list[Any] = []
        count, first = 0, self._done
        for number, record in enumerate(self._dataset):
            if number == self._end:
                break
            if number < self._done:
                continue
            if count // size == self._rank:
                own.append(record)
            count += 1
            if count == size * self._size:
                yield self._round(first, own, count)
                first, count, own = first + count, 0, []
        if count:
            yield self._round(first, own, count)

    def _round(self, first: int, own: list[Any], count: int) -> tuple[int, list[Any], int, int]:
        return first + self._rank * self._batch_size, own, first + count, math.ceil(count / self._batch_size)


def _collated(collate: Callable[[list[Any]], Any], item: tuple[int, list[Any], int, int]) -> tuple[Any, ...]:
    first, own, done, batches = item
    return first, len(own), collate(own) if own else None, done, batches


def _iterated(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield the batches of the loader, whose workers ignore stop signals and end with the iteration."""
    source = ReplayedLoader(loader)
    try:
        yield from source.begin(0)
    finally:
        source.close()


class ArgumentError(UsageError, ValueError):
    """Raised for arguments that Determined refuses with a ValueError, too."""


def records_of(
    dataset: Dataset[Any], batch_size: int | None, options: Mapping[str, Any] | None, *, rank: int, size: int
) -> Records:
    """Return the records that one rank reads. `options`: the argument `dataloader_kwargs` of `torch_batch_process`.

    Raises ValueError for arguments that contradict each other or the order of the records, and UsageError for a stream
    that worker processes would read several times.
    """
    given = dict(options or {})
    problem = _problem(batch_size, given)
    if problem:
        raise ArgumentError(f"torch_batch_process: {problem}")
    batch_size = given.pop("batch_size", None) or batch_size or 1
    drop_last = given.pop("drop_last", False)
    if (length := _length(dataset)) is None:
        _check_stream(given, drop_last)
    elif drop_last:
        length -= length % batch_size
    return Records(dataset=dataset, batch_size=batch_size, options=given, length=length, rank=rank, size=size)


def _problem(batch_size: int | None, options: Mapping[str, Any]) -> str:
    if batch_size is not None and "batch_size" in options:
        return "batch_size is an argument and in dataloader_kwargs; remove one of them"
    for name in ("shuffle", "sampler", "batch_sampler"):
        if options.get(name) not in (None, False):
            return f"{name} is in dataloader_kwargs, but records are processed in the order of the data set; remove it"
    if (size := options.get("batch_size", batch_size)) is not None and size < 1:
        return f"batch_size is {size}; use at least 1"
    return ""


def _length(dataset: Dataset[Any]) -> int | None:
    if isinstance(dataset, IterableDataset):
        return None
    if not hasattr(dataset, "__len__"):
        raise ArgumentError(
            f"torch_batch_process: {type(dataset).__name__} has no __len__; define it, or make the data set a "
            f"torch.utils.data.IterableDataset"
        )
    return len(dataset)


def _check_stream(options: Mapping[str, Any], drop_last: bool) -> None:
    if drop_last:
        raise UsageError("torch_batch_process: drop_last needs a data set with a length; remove it")
    if options.get("num_workers", 0) > 1:
        raise UsageError(
            f"torch_batch_process: num_workers is {options['num_workers']}, and each worker would read all records of "
            f"the IterableDataset; use 0 or 1"
        )
