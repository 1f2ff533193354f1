"""The values that `process_batch` returns: collected by each rank, written to files of a part, and read in order.

A file records-FIRST.pth contains the values of several batches of one rank: `first`, the numbers of their first
records, `count`, their numbers of records, and `values`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_det.checkpoint.content import check_loadable, load
from hpc_det.errors import HpcDetError, UsageError, count
from hpc_det.pytorch.inference.output_folder import Part, files_of, parts_in
from hpc_det.store.folders import TrialFolder

FILE_BYTES = 1 << 26
"""Bytes of tensors and arrays that a rank collects before it writes a file."""


class CollectedValues:
    """The values of one rank that no file contains yet."""

    def __init__(self) -> None:
        self._batches: list[tuple[int, int, Any]] = []
        """First record, number of records and values of each batch."""
        self._bytes = 0

    def add(self, first: int, records: int, values: Any) -> None:
        """Add what `process_batch` returned for the batch of `records` records from number `first` on.

        Raises UsageError if it does not have one entry for each record.
        """
        if problem := _mismatch(values, records):
            raise UsageError(
                f"process_batch returned {problem} for a batch of {count(records, 'record')}; return None, or one "
                "entry for each record: a tensor or array with the records as its first dimension, a list, or a dict "
                "of these"
            )
        self._batches.append((first, records, _copied(values)))
        self._bytes += _bytes(values)

    @property
    def is_full(self) -> bool:
        return self._bytes >= FILE_BYTES

    def __bool__(self) -> bool:
        return bool(self._batches)

    def write(self, folder: Path) -> None:
        """Write the values to a new file in `folder`. Raises HpcDetError for objects that cannot be loaded safely."""
        first, count, values = map(list, zip(*self._batches, strict=True))
        content = {"first": first, "count": count, "values": values}
        name = f"records-{first[0]:012}.pth"
        check_loadable({name: content})
        torch.save(content, folder / name)
        self._batches, self._bytes = [], 0


class Outputs:
    """The outputs of a batch inference. It may still run: the outputs of the records that are done can be read."""

    def __init__(self, folder: str | Path) -> None:
        """`folder`: the folder of the trial, or its folder `outputs`. Raises UsageError if there are no outputs."""
        path = Path(folder)
        inside = TrialFolder(path).outputs
        self.folder = inside if inside.is_dir() else path
        if not (self.folder.is_dir() and (inside.is_dir() or path.name == inside.name)):
            raise UsageError(f"{folder}: contains no outputs; name the folder of a trial of a batch inference")

    def parts(self) -> list[Part]:
        """Return the parts in the order of the data set."""
        return parts_in(self.folder)

    def files(self, pattern: str = "*") -> Iterator[Path]:
        """Yield the files that match a glob pattern: by part, in a part by rank, and of a rank by name."""
        for part in self.parts():
            yield from files_of(part, pattern)

    def batches(self) -> Iterator[tuple[int, Any]]:
        """Yield what `process_batch` returned for each batch, in the order of the data set.

        Each comes with the number of its first record; tensors are on the CPU.
        """
        for first, _, values in self._batches():
            yield first, values

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield the number of each record and its entry in what `process_batch` returned, in the order of the data
        set.
        """
        for first, records, values in self._batches():
            for index in range(records):
                yield first + index, _entry(values, index)

    def _batches(self) -> Iterator[tuple[int, int, Any]]:
        for part in self.parts():
            by_rank = [_of_rank(folder) for folder in part.ranks]
            yield from heapq.merge(*by_rank, key=lambda batch: batch[0])


def _of_rank(folder: Path) -> Iterator[tuple[int, int, Any]]:
    """Yield first record, number of records and values of each batch of one rank in a part."""
    for path in sorted(folder.glob("records-*.pth")):
        content = load(path)
        if not isinstance(content, dict) or content.keys() != {"first", "count", "values"}:
            raise HpcDetError(f"{path}: does not contain the values of batches")
        yield from zip(content["first"], content["count"], content["values"], strict=True)


def _mismatch(values: Any, records: int) -> str:
    """Return the text that names a value without one entry for each record; "" if there is none."""
    if isinstance(values, Mapping):
        return next(
            (f"{problem} as {name!r}" for name, each in values.items() if (problem := _mismatch(each, records))), ""
        )
    if isinstance(values, (torch.Tensor, np.ndarray)):
        shape = tuple(values.shape)
        return "" if shape[:1] == (records,) else f"{type(values).__name__} of shape {shape}"
    if isinstance(values, (list, tuple)):
        return "" if len(values) == records else f"{type(values).__name__} of {count(len(values), 'entry')}"
    return type(values).__name__


def _copied(values: Any) -> Any:
    """Return the values on the CPU, as a copy: the processor may reuse its memory, and a view would save it all."""
    if isinstance(values, torch.Tensor):
        return values.detach().to("cpu", copy=True)
    if isinstance(values, np.ndarray):
        return values.copy()
    if isinstance(values, Mapping):
        return {name: _copied(each) for name, each in values.items()}
    return [_copied(each) if isinstance(each, (torch.Tensor, np.ndarray, Mapping)) else each for each in values]


def _bytes(values: Any) -> int:
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return int(values.nbytes)
    if isinstance(values, Mapping):
        return sum(map(_bytes, values.values()))
    return sum(map(_bytes, values)) if isinstance(values, (list, tuple)) else 0


def _entry(values: Any, index: int) -> Any:
    if isinstance(values, dict):
        return {name: _entry(each, index) for name, each in values.items()}
    return values[index]
