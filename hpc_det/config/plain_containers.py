"""Plain dicts and lists instead of their subclasses, such as easydict, addict and attrdict have.

Their objects can be in no checkpoint, which are read without unpickling other classes, and some fail when they are
copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def plain_containers(value: Any) -> Any:
    """Return a copy of nested maps and sequences as dicts, lists and tuples; other values stay the same objects."""
    if isinstance(value, Mapping):
        return {key: plain_containers(value[key]) for key in value}
    if isinstance(value, tuple):
        return tuple(map(plain_containers, value))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, range)):
        return [plain_containers(item) for item in value]
    return value
