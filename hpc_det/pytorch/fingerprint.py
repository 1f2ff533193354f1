"""Values of a training as short texts: the same text means the same bits.

Numbers and strings are shown as they are; tensors and arrays by type, shape and a hash (blake2b, 64 bits).
"""

from __future__ import annotations

import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpc_det.resume_check.causes import GENERATOR, MODULE, OPTIMIZER

MOST_SHOWN = 4
"""Numbers of a tensor that are shown as they are."""
LONGEST_TEXT = 80
LARGEST_BYTES = 64 * 2**20
"""Larger arrays in attributes are data sets, usually: hashing them before each batch would take seconds."""
MOST_VALUES = 5000
"""In one attribute."""
DEEPEST = 8
_CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "deepspeed", "hpc_det"}
"""Packages whose objects are not looked into, unless named below."""
_SHOWN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath, date, timedelta, range, itertools.count)

_CONTAINERS = (Mapping, list, tuple, deque, set, frozenset)

Texts = dict[str, str]


def tensor_text(tensor: torch.Tensor) -> str:
    """Of this rank's part, where it is sharded."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    tensor = getattr(tensor, "ds_tensor", tensor).detach()  # ZeRO-3 keeps this rank's part there
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.dim() == 0:
        return f"{kind} {tensor.item()!r}"
    if 0 < tensor.numel() <= MOST_SHOWN:
        return f"{kind} {tensor.tolist()!r}"
    content = tensor.cpu().contiguous().flatten()
    return f"{kind} {tuple(tensor.shape)} {_hashed(content.view(torch.uint8).numpy().data)}"


def texts_of(path: str, value: Any, skipped: frozenset[int] = frozenset()) -> Texts:
    """Each value in `value`, by the Python expression that leads to it from `path`.

    Objects whose id is in `skipped`, functions, locks, files and generators are left out.
    """
    found = itertools.islice(_Walk(skipped).of(path, value, DEEPEST), MOST_VALUES)
    return dict(found)


class _Walk:
    def __init__(self, skipped: frozenset[int]) -> None:
        self._seen: dict[int, Any] = {}
        """Objects, which must not be freed while their ids are in use; of lists and maps those that are open.

        A list may be part of two others, and a copy in each of them after a resume: it is shown in both.
        """
        self._skipped = skipped

    def of(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, _SHOWN):
            yield path, _short(repr(value))
        elif id(value) in self._skipped or id(value) in self._seen or not depth:
            return
        else:
            self._seen[id(value)] = value
            if (text := _text_of_array(value) or _text_of_generator(value)) is not None:
                yield path, text
            else:
                for name, part in _parts(value):
                    yield from self.of(f"{path}{name}", part, depth - 1)
            if text is not None or isinstance(value, _CONTAINERS):
                del self._seen[id(value)]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """By what follows the expression of `value`."""
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        kind = MODULE if isinstance(value, torch.nn.Module) else OPTIMIZER
        yield from ((f" {kind}[{name!r}]", part) for name, part in value.state_dict().items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", part) for number, part in enumerate(list(value)))
    elif isinstance(value, (set, frozenset)):
        yield "", sorted(map(repr, value))
    elif type(value).__module__.partition(".")[0] not in _CLOSED:
        yield from attributes(value)


def attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Those in `__dict__`, but for what torch keeps there of a module."""
    known = vars(torch.nn.Module()) if isinstance(value, torch.nn.Module) else {}
    for name, part in list(getattr(value, "__dict__", {}).items()):
        if name not in known:
            yield f".{name}", part


def _text_of_array(value: Any) -> str | None:
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"
    if isinstance(value, torch.Tensor):
        size, shape = value.element_size() * value.numel(), tuple(value.shape)
        return tensor_text(value) if size <= LARGEST_BYTES else f"{value.dtype} {shape}, too large to compare"
    if not isinstance(value, np.ndarray):
        return None
    shown = f"{value.dtype} {value.shape}"
    if value.nbytes > LARGEST_BYTES or value.dtype.hasobject:
        return f"{shown}, not compared"
    return f"{shown} {_hashed(value.tobytes())}"


def _text_of_generator(value: Any) -> str | None:
    if isinstance(value, torch.Generator):
        return f"{GENERATOR} {_hashed(value.get_state().numpy().data)}"
    if isinstance(value, random.Random) and type(value) is not random.SystemRandom:
        return f"{GENERATOR} {_hashed(repr(value.getstate()).encode())}"
    if isinstance(value, np.random.Generator):
        return f"{GENERATOR} {_hashed(repr(value.bit_generator.state).encode())}"
    if isinstance(value, np.random.RandomState):
        return f"{GENERATOR} {_hashed(repr([*map(_plain, value.get_state(legacy=True))]).encode())}"
    return None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 24]}... {_hashed(text.encode())}"


def _hashed(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
