"""Batches on their way to a rank's device, and data as trials nest it: dicts, lists and tuples of any depth around
tensors and other values.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch


class ToDevice:
    """Moves nested data: dicts, lists and tuples of any depth."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._warned: set[type] = set()

    def __call__(self, data: Any) -> Any:
        """Tensors, numeric arrays and whatever has `.to` on the device; other types as they are, with one warning each.

        Copies from pinned memory do not wait for the device.
        """
        if self._on_cpu and type(data) in (list, tuple) and all(map(_is_on_cpu, data)):
            return data  # the ordinary batch
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
            warnings.warn(
                f"to_device: {type(data).__name__} stays where it is; only tensors and arrays move", stacklevel=3
            )
        return data


def _is_on_cpu(value: Any) -> bool:
    """At once; to compare devices takes several times as long."""
    return type(value) is torch.Tensor and value.is_cpu


def prefetched(batches: Iterable[Any], move: Callable[[Any], Any], device: torch.device) -> Iterator[Any]:
    """`batches` on a GPU, each copied on a stream of its own while the one before is in training.

    Only for batches that worker processes load: one that this process loads would draw its random numbers too early.
    """
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting = None
    for batch in batches:
        # What this copy overwrites was freed here, after the batches that were trained so far: it waits for those.
        copies.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copies):
            upcoming = (move(batch), copies.record_event())
        if waiting:
            yield _ready(*waiting)
        waiting = upcoming
    if waiting:
        yield _ready(*waiting)


def _ready(batch: Any, copied: torch.cuda.Event) -> Any:
    """For the stream that trains, which goes on after the copy."""
    torch.cuda.current_stream().wait_event(copied)
    return batch


def mapped(function: Callable[[Any], Any], data: Any) -> Any:
    """The same nesting with `function` of each value. What has a `.to` is a value, such as a PackedSequence."""
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
    """A dict of a class of its own, which may keep more than its items."""
    for name, value in values.items():
        data[name] = value
    return data
