"""Batches on their way to a rank's device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch


class ToDevice:
    """Moves nested data: dicts, lists and tuples of any depth."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warned: set[type] = set()

    def __call__(self, data: Any) -> Any:
        """Tensors, numeric arrays and whatever has `.to` on the device; other types as they are, with one warning each.

        Copies from pinned memory do not wait for the device.
        """
        if isinstance(data, torch.Tensor):
            return data if data.device == self._device else data.to(self._device, non_blocking=True)
        if isinstance(data, dict):
            return {name: self(value) for name, value in data.items()}
        if isinstance(data, tuple) and hasattr(data, "_fields"):
            return type(data)(*map(self, data))
        if isinstance(data, (list, tuple)):
            return type(data)(map(self, data))
        if isinstance(data, np.ndarray) and data.dtype.kind in "fciub":
            return torch.from_numpy(data).to(self._device, non_blocking=True)
        if hasattr(data, "to"):
            return data.to(self._device)
        return self._left(data)

    def _left(self, data: Any) -> Any:
        if type(data) not in self._warned:
            self._warned.add(type(data))
            warnings.warn(
                f"to_device: {type(data).__name__} stays where it is; only tensors and arrays move", stacklevel=3
            )
        return data


def prefetched(batches: Iterable[Any], move: Callable[[Any], Any], device: torch.device) -> Iterator[Any]:
    """`batches` on a GPU, each copied on a stream of its own while the one before is in training.

    Only for batches that worker processes load: one that this process loads would draw its random numbers too early.
    """
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting = None
    for batch in batches:
        with torch.cuda.stream(copies):
            upcoming = (move(batch), copies.record_event())
        if waiting:
            yield _ready(*waiting)
        waiting = upcoming
    if waiting:
        yield _ready(*waiting)


def _ready(batch: Any, copied: torch.cuda.Event) -> Any:
    """For the stream that trains: after the copy, and not to be overwritten while it still reads."""
    stream = torch.cuda.current_stream()
    stream.wait_event(copied)
    _used_on(batch, stream)
    return batch


def _used_on(data: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator (torch.Tensor.record_stream), which knows of the copying stream alone."""
    if isinstance(data, torch.Tensor):
        data.record_stream(stream)
    elif isinstance(data, dict):
        for value in data.values():
            _used_on(value, stream)
    elif isinstance(data, (list, tuple)):
        for value in data:
            _used_on(value, stream)
