"""Values of other kinds, in the places of a tree that has been read from JSON."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=5,
)
KINDS: list[Any] = [None, True, -1, 3, 1e308, 10**30, "x", "", [], {}, [[]], [None], {"a": 1}]
"""One of each."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [path, *(found for key in keys for found in places(tree[key], (*path, key)))]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy
