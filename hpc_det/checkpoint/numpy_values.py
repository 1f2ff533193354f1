"""numpy arrays and scalars in a checkpoint file, read without numpy's own unpickling.

torch.load(weights_only=True) takes them once numpy's names are declared safe, but numpy.dtype's are not: the flags in a
pickled dtype can make numpy follow an array's bytes as pointers to objects. So these stand-ins are declared instead,
under numpy's names of both spellings. They take the kind of number, its size and byte order, and build the rest anew.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

PLAIN_KINDS = "biufcUS"
"""Booleans, integers, floats, complex numbers, texts and bytes of fixed length (numpy's dtype.kind)."""


def is_plain(value: Any) -> bool:
    """Whether it is a numpy value that comes back from a checkpoint."""
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in PLAIN_KINDS


class StoredDtype:
    """For numpy.dtype."""

    def __init__(self, code: str, *_: Any) -> None:
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in PLAIN_KINDS:
            raise pickle.UnpicklingError(f"numpy values of dtype {self.dtype} are not loaded, only numbers and texts")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """(version, byte order, subarray, names, fields, item size, alignment, flags)"""
        self.dtype = self.dtype.newbyteorder(state[1])


class StoredArray:
    """For numpy.ndarray. `array` is there once its state has come."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """(version, shape, dtype, whether in Fortran order, bytes)"""
        _, shape, stored, fortran, content = state
        # a copy owns its memory, as any other array
        self.array = _values(shape, stored, content, order="F" if fortran else "C").copy(order="K")


def stored_scalar(stored: Any, content: bytes) -> Any:
    """For numpy's `scalar`."""
    return _values((), stored, content)[()]


def _values(
    shape: tuple[int, ...], stored: Any, content: bytes, order: Literal["C", "F"] = "C"
) -> np.ndarray[Any, Any]:
    dtype = stored.dtype if isinstance(stored, StoredDtype) else None
    if dtype is None or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise pickle.UnpicklingError(f"{len(content)} bytes are no numpy values of dtype {dtype} in shape {shape}")
    return np.ndarray(shape, dtype, bytearray(content), order=order)


_STAND_INS: list[Any] = [
    (bytes, "builtins.bytes"),  # pickle's way to write b"", the content of an empty array
    (StoredDtype, "numpy.dtype"),
    (StoredArray, "numpy.ndarray"),
    *((StoredArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((stored_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
"""And the names they go by. numpy 1.26 writes `core`, numpy 2 `_core`."""


@contextmanager
def stand_ins(*, also: Sequence[Any] = ()) -> Iterator[None]:
    """Within, torch.load makes stand-ins of numpy's values, also where a trial has declared numpy's own names safe.

    `also`: other classes that it takes, besides those that a trial has declared safe.
    """
    before = get_safe_globals()
    clear_safe_globals()
    add_safe_globals([*(known for known in before if not _is_of_numpy(known)), *_STAND_INS, *also])
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(before)


def _is_of_numpy(known: Any) -> bool:
    name = known[1] if isinstance(known, tuple) else known.__module__
    return bool(name.split(".")[0] == "numpy")


def with_arrays(content: Any) -> Any:
    """What torch.load gave, with arrays for the stand-ins; dicts and lists stay the same objects."""
    if isinstance(content, StoredArray):
        if content.array is None:
            raise pickle.UnpicklingError("a numpy array without content")
        return content.array
    if isinstance(content, dict):
        for key, value in [*content.items()]:
            content[key] = with_arrays(value)
    elif isinstance(content, list):
        content[:] = map(with_arrays, content)
    elif type(content) is tuple:
        return tuple(map(with_arrays, content))
    return content
