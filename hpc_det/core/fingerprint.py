"""Values of a training as short texts: equal texts mean equal bits.

Numbers and strings are shown unchanged; tensors and arrays by type, shape and a hash (blake2b, 64 bits).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, timedelta
from enum import Enum
from pathlib import PurePath
from types import BuiltinMethodType, FunctionType, GeneratorType, MethodType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpc_det.errors import count
from hpc_det.store.trace_names import GENERATOR, unwrapped

MOST_SHOWN = 4
"""Largest number of elements with which a tensor is shown unchanged."""
LONGEST_TEXT = 80
"""Largest number of characters with which a value is shown unchanged."""
LARGEST_BYTES = 64 * 2**20
"""Arrays in attributes above this size are skipped. They are usually data sets, and hashing them before each batch
would take seconds.
"""
MOST_VALUES = 5000
"""Largest number of values in one attribute."""
DEEPEST = 8
"""Largest number of nested levels that are shown."""
_CLOSED = {*sys.stdlib_module_names, "torch", "numpy", "deepspeed", "hpc_det", "tqdm", "rich"}
"""Packages whose objects are not inspected, except those named below."""
PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath, date, timedelta, range, itertools.count)
"""Types of values that are shown by their `repr`."""
_WRAPPABLE = {
    torch.nn.Module: "module",
    torch.optim.Optimizer: "optimizer",
    torch.optim.lr_scheduler.LRScheduler: "scheduler",
    torch.amp.GradScaler: "scaler",
}

_CONTAINERS = (dict, list, tuple, deque, set, frozenset)

Texts = dict[str, str]


def tensor_text(tensor: torch.Tensor) -> str:
    """Return the text of a tensor; for a sharded one, of this rank's part."""
    try:
        return _tensor_text(tensor)
    except RuntimeError:  # such as of nested tensors
        return f"{type(tensor).__name__}, not compared"


def _tensor_text(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    tensor = getattr(tensor, "ds_tensor", tensor).detach()  # ZeRO-3 keeps this rank's part there
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if tensor.is_meta:
        return f"{kind} {shape} without values"
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.dim() == 0:
        return f"{kind} {tensor.item()!r}"
    if 0 < tensor.numel() <= MOST_SHOWN:
        return f"{kind} {tensor.tolist()!r}"
    content = tensor.cpu().resolve_conj().resolve_neg().contiguous().flatten()
    return f"{kind} {shape} {_hashed(content.view(torch.uint8).numpy().data)}"


def texts_of(path: str, value: Any) -> Texts:
    """Return the text of each value in `value`, by the Python expression that leads to it from `path`.

    Objects of the standard library such as locks and files are left out.
    """
    return dict(_Walk(frozenset(), math.inf).of(path, value, DEEPEST))


def some_texts_of(path: str, value: Any, skipped: frozenset[int] = frozenset()) -> Texts:
    """Return the texts as `texts_of` does, without large arrays and at most `MOST_VALUES` of them.

    `skipped`: the ids of objects that are left out.
    """
    return dict(itertools.islice(_Walk(skipped, LARGEST_BYTES).of(path, value, DEEPEST), MOST_VALUES))


class _Walk:
    """One walk through an object and the objects that it refers to."""

    def __init__(self, skipped: frozenset[int], largest_bytes: float) -> None:
        self._seen: dict[int, Any] = {}
        """Objects by id, kept so that no id is reused while the walk runs; lists and maps only while they are open.

        A list may be part of two others, and two separate copies after a resume, so it is shown in both.
        """
        self._skipped = skipped
        self._largest_bytes = largest_bytes

    def of(self, path: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
        if isinstance(value, PLAIN):
            yield path, _short(repr(value))
        elif id(value) in self._skipped or id(value) in self._seen or not depth:
            return
        else:
            self._seen[id(value)] = value
            if text := self._text(value):
                yield path, text
            else:
                for name, part in _parts(value):
                    yield from self.of(f"{path}{name}", part, depth - 1)
            if text is not None or isinstance(value, _CONTAINERS):
                del self._seen[id(value)]

    def _text(self, value: Any) -> str | None:
        """Return the text of a value without parts; None for a container or an object that is not inspected."""
        if isinstance(value, (torch.Tensor, np.ndarray)) and _size_in_bytes(value) > self._largest_bytes:
            return f"{value.dtype} {tuple(value.shape)}, too large to compare"
        return _text_of_array(value) or _text_of_generator(value) or _text_of_iterator(value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of `value` by the suffix of their expression. Containers are copied first, since other threads
    may change them.
    """
    kind = next((kind for each, kind in _WRAPPABLE.items() if isinstance(value, each)), None)
    if kind:
        yield from ((f" {unwrapped(kind)}[{name!r}]", part) for name, part in value.state_dict().items())
    if isinstance(value, dict):
        yield from ((f"[{_key(key)}]", part) for key, part in dict.copy(value).items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{number}]", part) for number, part in enumerate(list(value)))
    elif isinstance(value, (set, frozenset)):
        yield "", sorted(map(_key, frozenset(value)))
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        yield ".__self__", value.__self__
    elif isinstance(value, GeneratorType):
        yield from ((f" (running).{name}", part) for name, part in _variables_of(value).items())
    elif is_users(value):
        yield from attributes(value)
        yield from _enclosed(value)


def is_users(value: object) -> bool:
    """Return whether the object or its class is defined by the user, or by a library that is inspected."""
    owner = value if isinstance(value, (type, FunctionType)) else type(value)
    return str(owner.__module__).partition(".")[0] not in _CLOSED


def attributes(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes in `__dict__`, except those that torch stores in a module and Python in a class."""
    known = vars(torch.nn.Module()) if isinstance(value, torch.nn.Module) else {}
    for name, part in getattr(value, "__dict__", {}).copy().items():
        if name not in known and not name.startswith("__"):
            yield f".{name}", part


def _enclosed(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function has from its enclosing function."""
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                yield f" (closure).{name}", cell.cell_contents


def _variables_of(running: GeneratorType[Any, Any, Any]) -> dict[str, Any]:
    return dict(running.gi_frame.f_locals) if running.gi_frame else {}


def _key(key: Any) -> str:
    """Return a key as text; other objects by their class, since their `repr` usually contains an address."""
    if isinstance(key, tuple):
        return _short(f"({', '.join(map(_key, key))})")
    return _short(repr(key)) if isinstance(key, PLAIN) else type(key).__name__


def _size_in_bytes(array: torch.Tensor | np.ndarray[Any, Any]) -> int:
    """Return the size in bytes; of a sparse or nested tensor, which has no nbytes, the size as if it were dense."""
    return array.numel() * array.element_size() if isinstance(array, torch.Tensor) else array.nbytes


def _text_of_array(value: Any) -> str | None:
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.item()!r}"
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, np.ndarray):
        content = "not compared" if value.dtype.hasobject else _hashed(value.tobytes())
        return f"{value.dtype} {value.shape} {content}"
    return None


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


def _text_of_iterator(value: Any) -> str | None:
    if not isinstance(value, Iterator):
        return None
    yielded = getattr(value, "_num_yielded", None)  # of an iterator of a DataLoader
    if isinstance(yielded, int):
        return f"iterator after {count(yielded, 'batch')}"
    if type(value).__module__ == "builtins":
        left = operator.length_hint(value, -1)
        return f"iterator with {left} to come" if left >= 0 else None
    return None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 24]}... {_hashed(text.encode())}"


def _hashed(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
