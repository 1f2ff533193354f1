"""What a file of a checkpoint may hold, and how it is read: nothing of it could run code."""

from __future__ import annotations

import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpc_det.errors import HpcDetError

_VALUES = (bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device)
_MAPS = (dict, OrderedDict, Counter)
_ROWS = (list, tuple, set, torch.Size)


def check_loadable(files: Mapping[str, Any]) -> None:
    """Raises HpcDetError naming everything in `files` that `load` would refuse."""
    if problems := [problem for name, content in files.items() for problem in not_loadable(content, name)]:
        raise HpcDetError(problems)


def not_loadable(content: Any, path: str) -> Iterator[str]:
    """What `load` would refuse, since it could run code: better no save than a resume that fails.

    Classes derived from these are refused, too: unpickling would have to import them.
    """
    kind = type(content)
    if kind in _MAPS:
        for key, value in content.items():
            yield from not_loadable(key, f"{path}: the key {key!r}")
            yield from not_loadable(value, f"{path}: {key}" if path.endswith(".pth") else f"{path}.{key}")
    elif kind in _ROWS:
        for i, value in enumerate(content):
            yield from not_loadable(value, f"{path}[{i}]")
    elif kind not in _VALUES and not _is_tensor(content) and not is_plain(content):
        found = f"{content.dtype} array" if kind is np.ndarray else f"{kind.__module__}.{kind.__name__}"
        yield f"{path}: {found} cannot be part of a checkpoint; save tensors, numbers, texts, lists and maps of them"


def _is_tensor(content: Any) -> bool:
    """One by itself: a DTensor, say, is a part of one, and to unpickle it takes the gang that it is spread over."""
    return isinstance(content, torch.Tensor) and not is_traceable_wrapper_subclass(content)


def load(path: Path, **options: Any) -> Any:
    """A file of a checkpoint, on the CPU, unpickling nothing but tensors, numpy's numbers, texts and plain containers.

    `options`: torch.load's `map_location` and `mmap`. Raises pickle.UnpicklingError where the file holds anything else.
    """
    with stand_ins():
        return with_arrays(torch.load(path, **{"map_location": "cpu", **options, "weights_only": True}))


def read(path: Path, **options: Any) -> Any:
    """`load`, for a file that somebody else may have written: raises HpcDetError that says what is wrong with it."""
    try:
        return load(path, **options)
    except pickle.UnpicklingError as error:
        raise HpcDetError(
            f"{path}: holds more than tensors, numbers, texts, lists and maps, and to load it could run code that it "
            f"brings ({_reason(error)}). If you trust it: torch.load it with weights_only=False, take that out, and "
            f"torch.save it"
        ) from None
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise HpcDetError(f"{path}: cannot be read ({said}); it may be damaged: use another checkpoint") from None


def _reason(error: pickle.UnpicklingError) -> str:
    """torch's own words, between its advice how to load the file anyway and the address of its documentation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-2] if len(lines) > 1 else str(error)
    return reason.removeprefix("WeightsUnpickler error: ").partition(". Please use ")[0]


# --- numpy arrays and scalars, read without numpy's own unpickling
#
# torch.load(weights_only=True) takes them once numpy's names are declared safe, but numpy.dtype's are not: the flags in
# a pickled dtype can make numpy follow an array's bytes as pointers to objects. So these stand-ins are declared
# instead, under numpy's names of both spellings. They take the kind of number, its size and byte order, and build the
# rest anew.

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
