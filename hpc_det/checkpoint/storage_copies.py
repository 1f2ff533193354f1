"""Copies of tensors' memory to the CPU by several threads, while training waits for them."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from threading import Thread

import torch

_PART = 1 << 20
"""Bytes that a thread copies at a time. Smaller storages are left to the caller: threads would wait for the GIL."""
_THREADS = 4
"""At most: a few use all that memory can do."""
_Part = tuple[int, int, int]
"""Target, source, bytes: what memmove takes."""


def copy_storages(pairs: Sequence[tuple[torch.UntypedStorage, torch.Tensor]]) -> None:
    """Copy each storage into its uint8 tensor on the CPU, with as many threads as torch may use on this rank.

    torch's own copy gives each core the same share, and waits for a core that others keep busy.
    """
    for storage, to in pairs:
        if storage.device.type != "cpu":
            to.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), non_blocking=True)
    on_cpu = [(storage, to) for storage, to in pairs if storage.device.type == "cpu"]
    large = [part for storage, to in on_cpu if storage.nbytes() >= _PART for part in _parts(storage, to)]
    small = [part for storage, to in on_cpu if storage.nbytes() < _PART for part in _parts(storage, to)]
    left = iter(large)
    others = min(torch.get_num_threads(), _THREADS, len(large)) - 1
    threads = [Thread(target=_copy, args=(left,), name="copy", daemon=True) for _ in range(others)]
    try:
        for thread in threads:
            thread.start()
        _copy(small)
        _copy(left)
    finally:  # the threads use memory that may be freed when this returns
        deque(left, maxlen=0)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if any(storage.device.type == "cuda" for storage, _ in pairs):
        torch.cuda.synchronize()


def _parts(storage: torch.UntypedStorage, to: torch.Tensor) -> Iterator[_Part]:
    source, target, size = storage.data_ptr(), to.data_ptr(), storage.nbytes()
    for offset in range(0, size, _PART):
        yield target + offset, source + offset, min(_PART, size - offset)


def _copy(parts: Iterable[_Part]) -> None:
    """Copy each part that no other thread has taken from the same iterator."""
    for part in parts:
        ctypes.memmove(*part)
