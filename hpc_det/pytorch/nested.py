"""Data as trials nest it: dicts, lists and tuples of any depth around tensors and other values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def mapped(function: Callable[[Any], Any], data: Any) -> Any:
    """The same nesting with `function` of each value."""
    if isinstance(data, dict):
        return {name: mapped(function, value) for name, value in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*[mapped(function, value) for value in data])
    if isinstance(data, (list, tuple)):
        return type(data)([mapped(function, value) for value in data])
    return function(data)
