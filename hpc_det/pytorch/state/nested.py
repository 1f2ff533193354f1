"""Data as trials nest it: dicts, lists and tuples of any depth around tensors and other values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


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
