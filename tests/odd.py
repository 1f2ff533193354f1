"""Damage: files that are truncated, flipped or overwritten, and values of other types in a tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=8), each, max_size=3),
    max_leaves=5,
)
KINDS: list[Any] = [None, True, -1, 3, 1e308, 10**30, "x", "", [], {}, [[]], [None], {"a": 1}]
"""One value of each type."""


BYTES = [b"", b"{", b"{}", b"[]", b"7", b"null", b'"x"', b"\xff\xfe", b"\0" * 40, b"[" * 9999, b'{"a":' * 9999]
MORE = [*BYTES, b"1" + b"0" * 5000, b"NaN", b"{}\n{}", b'{"event": "x"}']


def damages(content: bytes) -> Iterator[bytes]:
    """Yield `content` truncated, flipped, replaced, or with a value of another type in one of its places."""
    for eighth in range(1, 8):
        place = len(content) * eighth // 8
        yield content[:place]
        yield content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :]
        yield content[:place] + b"\0" * (len(content) - place)
    yield from MORE
    yield content + content
    lines = content.splitlines()
    if not lines or not content.startswith(b"{"):
        return
    *before, last = [content] if content.startswith(b"{\n") else lines
    tree = json.loads(last)
    for changed in (change for key in tree for change in changes(tree, key)):
        yield b"\n".join([*before, json.dumps(changed).encode()]) + b"\n"


def flips_and_cuts(content: bytes) -> Iterator[bytes]:
    """Yield `content` as a failing disk leaves it: with a flipped bit, without its end, or as zeros."""
    size = len(content)
    for place in sorted({0, size // 3, size // 2, size - 2, size - 1} & {*range(size)}):
        for bit in (0x01, 0x80):  # the first leaves a text a text, the second does not
            yield content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    for left in sorted({0, size // 2, size - 1} & {*range(size)}):
        yield content[:left]
    if (zeros := content[: size // 2].ljust(size, b"\0")) != content:
        yield zeros


def overwrite(path: Path, content: bytes) -> None:
    """Replace the file at `path`, but not its other hard links: checkpoints share the files of their code."""
    mode = path.stat().st_mode
    path.unlink()
    path.write_bytes(content)
    path.chmod(mode)


def changes(tree: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    yield {name: value for name, value in tree.items() if name != key}
    yield from ({**tree, key: odd} for odd in KINDS if odd != tree[key])
    if isinstance(tree[key], dict):
        yield from ({**tree, key: changed} for inner in tree[key] for changed in changes(tree[key], inner))


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values."""
    keys = tree.keys() if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    return [path, *(found for key in keys for found in places(tree[key], (*path, key)))]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy
