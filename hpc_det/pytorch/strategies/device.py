"""Moving batches to a rank's device, and functions on nested data: dicts, lists and tuples of any depth."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_det.errors import UsageError


class ToDevice:
    """Moves nested data to a device."""

    def __init__(self, device: torch.device, warned: set[type] | None = None) -> None:
        """`warned`: types without a further warning; those with one are added."""
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._warned = set() if warned is None else warned

    def __call__(self, data: Any) -> Any:
        """Return the data with tensors, numeric arrays and objects with `.to` on the device.

        Values of other types stay, with one warning for each type. Copies from pinned memory do not wait for the
        device.
        """
        kind = type(data)
        if self._on_cpu and (kind is tuple or kind is list):
            for value in data:
                # Comparing a tensor's device with another takes several times as long as `is_cpu`.
                if type(value) is not Tensor or not value.is_cpu:
                    break
            else:
                return data  # the usual case, without walking the data
        return mapped(self._moved, data)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.device == self._device else value.to(self._device, non_blocking=True)
        if isinstance(value, np.ndarray) and value.dtype.kind in "fciub":
            return torch.from_numpy(value).to(self._device, non_blocking=True)
        if hasattr(value, "to"):
            return value.to(self._device)
        return self._left(value)

    def _left(self, data: Any) -> Any:
        if type(data) not in self._warned:
            self._warned.add(type(data))
            warnings.warn(f"to_device: {type(data).__name__} is not moved; only tensors and arrays are", stacklevel=3)
        return data


def to_device(data: Any, device: torch.device | str, warned_types: set[type] | None = None) -> Any:
    """Return nested data with tensors, numeric arrays and objects with `.to` on a device; arrays become tensors.

    Values of other types stay, with one warning for each type that is not in `warned_types`, to which it is added.
    """
    return ToDevice(torch.device(device), warned_types)(data)


def data_length(data: Any) -> int:
    """Return the number of records in a batch: the first dimension of its first tensor or array.

    Raises UsageError if the first element of the nested data is neither, or has no dimension.
    """
    first = data
    while not isinstance(first, torch.Tensor):
        if isinstance(first, (list, tuple)) and first:
            first = first[0]
        elif isinstance(first, Mapping) and first:
            first = next(iter(first.values()))
        else:
            break
    if isinstance(first, (torch.Tensor, np.ndarray)) and (shape := first.shape):
        return int(shape[0])
    raise UsageError(
        f"get_batch_length: the first element of a batch is {type(first).__name__}, which does not give the number of "
        f"records; override get_batch_length in your trial"
    )


def prefetched(batches: Iterable[Any], move: Callable[[Any], Any], device: torch.device) -> Iterator[Any]:
    """Yield `batches` on a GPU, each copied on a separate stream while the one before is in training.

    Use it only for batches of worker processes: a batch loaded by this process would draw its random numbers too early.
    """
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting = None
    for batch in batches:
        # torch may reuse the memory of an earlier batch whose training the GPU has not finished: wait for that.
        copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            upcoming = (move(batch), copies.record_event())
        if waiting:
            yield _ready(*waiting)
        waiting = upcoming
    if waiting:
        yield _ready(*waiting)


def _ready(batch: Any, copied: torch.cuda.Event) -> Any:
    """Make the training stream wait for the copy, and return the batch."""
    torch.cuda.current_stream().wait_event(copied)
    return batch


def mapped(function: Callable[[Any], Any], data: Any) -> Any:
    """Return the same nesting with `function` of each value. An object with `.to` is a value, such as a
    PackedSequence.
    """
    if type(data) is dict:
        return {name: mapped(function, value) for name, value in data.items()}
    if hasattr(data, "to"):
        return function(data)
    if isinstance(data, dict):
        return _with_values({name: mapped(function, value) for name, value in data.items()}, copy.copy(data))
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*[mapped(function, value) for value in data])
    if isinstance(data, (list, tuple)):
        return type(data)([mapped(function, value) for value in data])
    return function(data)


def _with_values(values: dict[Any, Any], data: Any) -> Any:
    """Return a copy of a dict subclass, which may store more than its items, with new values."""
    for name, value in values.items():
        data[name] = value
    return data
