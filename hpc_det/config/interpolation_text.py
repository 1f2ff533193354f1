"""The text of interpolations: which pieces of a value are interpolations of OmegaConf, and which stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

RESOLVERS = ("oc.env", "oc.decode", "oc.select", "oc.create", "oc.dict.keys", "oc.dict.values", "hpc_det", "now")
"""The resolvers that are allowed."""
_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_OF_SHELL = re.compile(
    r"[A-Za-z_]\w*(:[-=+?]|[%#/^,@!~*])|[#!]\w|[\d@*#?$!-]+$"
    r"|(?!(?:hpc_det|now)\s*:)[A-Za-z_]\w*:\s*(-?\d|\(|\$(?!\{))"
)
"""Matches the inside of the forms of `${...}` that only a shell has."""
_READ_BY_SHELL = re.compile(r"((template\.|cluster\.experiment\.)?entrypoint|cluster\.setup)\b")
"""Matches the paths of the values that a shell reads."""


def stays(inside: str, path: str, is_set: Callable[[str], bool]) -> bool:
    """Return whether `${inside}` in the value at `path` is no interpolation. `is_set`: whether a key has a value.

    Where a shell reads the value, a name without a dot is always a variable of the shell.
    """
    if not inside:
        return True
    name = re.match(r"[A-Za-z_]\w*", inside)
    if name and inside[name.end() :][:1] in ("", "["):
        return _READ_BY_SHELL.match(path) is not None or not is_set(name[0])
    return _OF_SHELL.match(inside) is not None


def pieces(text: str, path: str, is_set: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of the value at `path`, and for each whether it is an interpolation of OmegaConf."""
    begin = 0
    for start, end, slashes, is_linked in _found(text, path, is_set):
        before = text[begin : start - slashes] + "\\" * (slashes // 2)
        if slashes % 2:
            yield before + "${", False
            begin = start + 2
        elif is_linked:
            if before:
                yield before, False
            yield text[start:end], True
            begin = end
    if text[begin:]:
        yield text[begin:], False


def escaped(text: str, path: str, is_set: Callable[[str], bool]) -> str:
    """Return the text whose value at `path` is `text`: with a backslash before what would be an interpolation."""
    result, begin = "", 0
    for start, _end, slashes, is_linked in _found(text, path, is_set, is_literal=True):
        if slashes % 2 or is_linked:
            result += text[begin:start] + "\\" * (slashes + 1) + "${"
            begin = start + 2
    return result + text[begin:]


def _found(
    text: str, path: str, is_set: Callable[[str], bool], *, is_literal: bool = False
) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the begin and end of each `${...}`, the number of backslashes before it, and whether it is an
    interpolation.

    `is_literal`: whether the text behind a found `${` is searched, too, because all of it stays as it is.
    """
    place = 0
    while (start := text.find("${", place)) >= 0 and (end := _end(text, start)) is not None:
        slashes = len(text[place:start]) - len(text[place:start].rstrip("\\"))
        is_linked = slashes % 2 == 0 and not stays(text[start + 2 : end - 1].strip(), path, is_set)
        yield start, end, slashes, is_linked
        place = start + 2 if slashes % 2 or (is_linked and is_literal) else end


def _end(text: str, start: int) -> int | None:
    """Return the index behind the brace that closes the one of `${` at `start`; None if it is not closed."""
    depth = 0
    for i in range(start + 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return None


def refused_resolvers(text: str, path: str) -> Iterator[str]:
    """Yield a problem for each resolver in an interpolation that is not allowed."""
    for name in dict.fromkeys(_RESOLVER.findall(text)):
        if name not in RESOLVERS:
            yield (
                f"{path}: {text}: unknown resolver {name!r}; known: {', '.join(RESOLVERS)}; write \\${{...}} for text "
                "that a shell expands"
            )
