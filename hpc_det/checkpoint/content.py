"""What a file of a checkpoint may hold, and how it is read: nothing of it could run code."""

from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hpc_det.checkpoint.numpy_values import is_plain, stand_ins, with_arrays
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
