"""The allowed content of checkpoint files, and functions that read them without running code from them."""

from __future__ import annotations

import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from torch.serialization import add_safe_globals, clear_safe_globals, get_safe_globals

from hpc_det.errors import HpcDetError

_VALUES = (bool, int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device)
_MAPS = (dict, OrderedDict, Counter)
_ROWS = (list, tuple, set, torch.Size)


def check_loadable(files: Mapping[str, Any]) -> None:
    """Raise HpcDetError if `load` would refuse anything in `files` (name -> object); the error names all of it."""
    if problems := [problem for name, content in files.items() for problem in not_loadable(content, name)]:
        raise HpcDetError(problems)


def not_loadable(content: Any, path: str) -> Iterator[str]:
    """Yield a sentence for each value in `content` that `load` would refuse because unpickling it could run code.

    A save with such a value fails: a failed save is better than a failed resume. `path`: where `content` is, for the
    sentences.
    """
    kind = type(content)  # not isinstance: unpickling an object of a subclass would import the subclass
    if kind in _MAPS:
        for key, value in content.items():  # at the top level `path` is the name of a file, such as state_dict.pth
            yield from not_loadable(key, f"{path}: the key {key!r}")
            yield from not_loadable(value, f"{path}: {key}" if path.endswith(".pth") else f"{path}.{key}")
    elif kind in _ROWS:
        for i, value in enumerate(content):
            yield from not_loadable(value, f"{path}[{i}]")
    elif kind not in _VALUES and not _is_tensor(content) and not is_plain(content):
        found = f"{content.dtype} array" if kind is np.ndarray else f"{kind.__module__}.{kind.__name__}"
        yield f"{path}: {found} cannot be part of a checkpoint; save tensors, numbers, texts, lists and maps of them"


def _is_tensor(content: Any) -> bool:
    """Return whether `content` is a plain tensor.

    A DTensor and other subclasses that wrap tensors are not: unpickling a DTensor needs a process group.
    """
    return isinstance(content, torch.Tensor) and not hasattr(content, "__tensor_flatten__")


def load(path: Path | IO[bytes], **options: Any) -> Any:
    """Return the content of a checkpoint file, or of an open file, by default on the CPU.

    Only tensors, numpy arrays, numbers, texts and plain containers are unpickled. `options`: torch.load's
    `map_location` and `mmap`. Raises pickle.UnpicklingError if the file contains anything else.
    """
    with stand_ins():
        return with_arrays(torch.load(path, **{"map_location": "cpu", **options, "weights_only": True}))


def read(path: Path, content: IO[bytes] | None = None, **options: Any) -> Any:
    """Like `load`, for a file that another program or user may have written. Raises HpcDetError with the reason.

    `content`: what to load instead of the whole file, if it is a part of it.
    """
    try:
        return load(content or path, **options)
    except pickle.UnpicklingError as error:
        raise HpcDetError(
            f"{path}: contains more than tensors, numbers, texts, lists and maps; loading it could run code from the "
            f"file ({_reason(error)}). If you trust it, torch.load it with weights_only=False, remove those objects, "
            f"and torch.save it"
        ) from None
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise HpcDetError(f"{path}: cannot be read ({said}); it may be damaged: use another checkpoint") from None


def _reason(error: pickle.UnpicklingError) -> str:
    """Return torch's reason, which is between advice to disable the check and a link to torch's documentation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-2] if len(lines) > 1 else str(error)
    return reason.removeprefix("WeightsUnpickler error: ").partition(". Please use ")[0]


# --- numpy arrays and scalars, read without numpy's own unpickling
#
# torch.load(weights_only=True) accepts them once numpy's names are declared safe. But numpy.dtype is not safe: the
# flags in a pickled dtype can make numpy follow the bytes of an array as pointers to objects. So these replacements are
# declared safe under numpy's names, in both spellings. They use only the kind of number, its size and its byte order.

PLAIN_KINDS = "biufcUS"
"""Allowed kinds (numpy's dtype.kind): booleans, integers, floats, complex numbers, texts and bytes of fixed length."""


def is_plain(value: Any) -> bool:
    """Return whether `value` is a numpy array or scalar that `load` accepts."""
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in PLAIN_KINDS


class StoredDtype:
    """Replaces numpy.dtype while a file is unpickled."""

    def __init__(self, code: str, *_: Any) -> None:
        self.dtype = np.dtype(str(code))
        if self.dtype.kind not in PLAIN_KINDS:
            raise pickle.UnpicklingError(f"numpy values of dtype {self.dtype} are not loaded, only numbers and texts")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Apply only the byte order of `state`.

        `state`: (version, byte order, subarray, names, fields, item size, alignment, flags).
        """
        self.dtype = self.dtype.newbyteorder(state[1])


class StoredArray:
    """Replaces numpy.ndarray while a file is unpickled. `array` is None until `__setstate__` was called."""

    def __init__(self, *_: Any) -> None:
        self.array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Create the array from `state`: (version, shape, dtype, whether in Fortran order, bytes)."""
        _, shape, stored, fortran, content = state
        # a copy, so that the array owns its memory, as one unpickled by numpy does (resize() requires it)
        self.array = _values(shape, stored, content, order="F" if fortran else "C").copy(order="K")


def stored_scalar(stored: Any, content: bytes) -> Any:
    """Return a numpy scalar; replaces numpy's `scalar` function while a file is unpickled."""
    return _values((), stored, content)[()]


def _values(
    shape: tuple[int, ...], stored: Any, content: bytes, order: Literal["C", "F"] = "C"
) -> np.ndarray[Any, Any]:
    dtype = stored.dtype if isinstance(stored, StoredDtype) else None
    if dtype is None or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise pickle.UnpicklingError(f"{len(content)} bytes do not match numpy dtype {dtype} and shape {shape}")
    return np.ndarray(shape, dtype, bytearray(content), order=order)


_STAND_INS: list[Any] = [
    (bytes, "builtins.bytes"),  # pickle writes b"", the content of an empty array, as a call of bytes()
    (StoredDtype, "numpy.dtype"),
    (StoredArray, "numpy.ndarray"),
    *((StoredArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((stored_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]
"""The replacements, each with the name that it replaces. numpy 1.26 writes `core`, numpy 2 writes `_core`."""


@contextmanager
def stand_ins(*, also: Sequence[Any] = ()) -> Iterator[None]:
    """Have torch.load use the replacements in this block, even if a trial has declared numpy's own names safe.

    `also`: further classes to accept, besides those that the trial has declared safe.
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
    """Return what torch.load returned, with arrays instead of StoredArrays; dicts and lists are changed in place."""
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
