"""`ray.tune.utils`: functions for dicts, and find_free_port."""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hpc_det.node.network import free_port as find_free_port
from hpc_det.sgd.tune.trainable import merged

__all__ = ["date_str", "deep_update", "find_free_port", "flatten_dict", "merge_dicts"]


def merge_dicts(d1: Mapping[str, Any], d2: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dict with the entries of both; nested dicts are merged, and otherwise the value of `d2` wins."""
    return deepcopy(merged(d1, d2))


def deep_update(original: dict[str, Any], new_dict: Mapping[str, Any], new_keys_allowed: bool = True) -> dict[str, Any]:
    """Merge `new_dict` into `original`, in place, and return `original`.

    Raises KeyError for a new key at the top unless `new_keys_allowed`.
    """
    new = [name for name in new_dict if name not in original]
    if new and not new_keys_allowed:
        raise KeyError(f"deep_update: {new[0]!r} is a new key; known: {', '.join(map(repr, original))}")
    original.update(merged(original, new_dict))
    return original


def flatten_dict(dt: Mapping[str, Any], delimiter: str = "/") -> dict[str, Any]:
    """Return a dict without nested dicts, whose keys are joined by `delimiter`."""
    flat: dict[str, Any] = {}
    for name, value in dt.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}{delimiter}{inner}": each for inner, each in flatten_dict(value, delimiter).items()}
        else:
            flat[name] = value
    return flat


def date_str() -> str:
    """Return the time as YEAR-MONTH-DAY_HOUR-MINUTE-SECOND."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")
