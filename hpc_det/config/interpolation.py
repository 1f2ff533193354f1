"""OmegaConf's interpolations in experiment files, with the same meaning in `experiment create` and `hpc-det run`.

`${key.path}` is the value of another key, after the merge with the template; `${resolver:...}` is allowed for the
resolvers in `RESOLVERS`. `${NAME}` stays as it is for the shell if no key of this name is set, as do the shell's other
forms such as `${NAME:-default}`. `\\${` stands for `${`. Environment variables are those of the submission.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Any, cast

from hpc_det.config.checks import FREE_FORM
from hpc_det.config.merge import Tree, join, merge, merge_layers
from hpc_det.config.secrets import SHORTEST, is_masked_at, looks_secret
from hpc_det.errors import UsageError
from hpc_det.resources import data_path

RESOLVERS = ("oc.env", "oc.decode", "oc.select", "oc.create", "oc.dict.keys", "oc.dict.values", "hpc_det", "now")
"""The resolvers that are allowed."""
_LAYERS = ("cluster", "template")
"""The keys below which a tree has the layers under the experiment's own configuration."""
_CONFIG = "__config__"
_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*:")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([A-Za-z_]\w*)")
_OF_SHELL = re.compile(r"[A-Za-z_]\w*(:[-=+?]|:\s*-?\d|[%#/^,@!~*])|[#!]\w|[\d@*#?$!-]+$")
"""Matches the inside of the forms of `${...}` that only a shell has."""
_LITERAL = re.compile("\ue000(\\d+)\ue001")
"""Matches what stands for a piece of literal text while OmegaConf resolves the rest."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A tree without interpolations."""

    tree: Tree
    sources: dict[str, str]
    """The text with interpolations that each value had, by path."""


def resolved(tree: Tree, below: Tree | None = None) -> Resolved:
    """Return the tree, whose keys `cluster` and `template` have the lower layers, with its interpolations resolved.

    Values are looked up in the merged configuration; `below` is one more layer, whose values are not resolved. Raises
    UsageError with every problem: a resolver that is not allowed, a key that is not set, a secret that would be shown.
    """
    if not any("${" in text for _path, text in texts(tree)):
        return Resolved(tree=tree, sources={})
    literals = _Literals(merge(below or {}, _merged(tree)))
    marked = {key: literals.marked(value, key) for key, value in tree.items()}
    if literals.problems:
        raise UsageError(literals.problems)
    linked = {path: text for path, text in texts(marked) if "${" in text}
    lookup = merge(literals.literal(below or {}), _merged(marked))
    values = _by_omegaconf(marked, lookup, linked) if linked else marked
    result: Tree = literals.restored(values)
    sources = {path: text for path, text in texts(tree) if path in linked}
    _refuse_shown_secrets(result, sources)
    return Resolved(tree=result, sources=sources)


def texts(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of every value that is a string, and the string."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from texts(value, join(path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from texts(value, f"{path}[{i}]")


_NO_SHELL = (*FREE_FORM, "name", "description")
"""The keys whose values no shell reads."""


def unresolved_notes(tree: Tree) -> Iterator[str]:
    """Yield a note for each `${NAME}` that stays as it is and that no shell expands either."""
    for path, text in texts({key: tree.get(key) for key in _NO_SHELL}):
        if found := re.search(r"\$\{(\w+)\}", text):
            yield f"{path}: {found[0]} stays as it is: no key {found[1]!r} is set, and no shell reads this value"


def _merged(tree: Tree) -> Tree:
    """Return the configuration in which interpolations look up their values."""
    own = {key: value for key, value in tree.items() if key not in _LAYERS}
    below = [_section(tree.get("cluster")).get("experiment"), tree.get("template")]
    layers = [(name, _section(layer)) for name, layer in zip(("cluster", "template"), below, strict=True)]
    return {**merge_layers([*layers, ("config", own)]).tree, **{key: tree[key] for key in _LAYERS if key in tree}}


def _section(value: Any) -> Tree:
    return value if isinstance(value, dict) else {}


# --- literal text and interpolations


class _Literals:
    """The pieces of text that are no interpolations of OmegaConf, although they may look like one."""

    def __init__(self, lookup: Tree) -> None:
        self._lookup = lookup
        self._texts: list[str] = []
        self.problems: list[str] = []

    def marked(self, value: Any, path: str) -> Any:
        """Return the value with a mark for each piece of literal text that OmegaConf could misread."""
        if isinstance(value, dict):
            return {key: self.marked(item, join(path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.marked(item, f"{path}[{i}]") for i, item in enumerate(value)]
        if not isinstance(value, str) or not ("${" in value or "\ue000" in value):
            return value
        return "".join(self._piece(text, is_linked, path) for text, is_linked in _pieces(value, self._is_of_shell))

    def literal(self, value: Any) -> Any:
        """Return the value with a mark in place of each text that looks like an interpolation."""
        if isinstance(value, dict):
            return {key: self.literal(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.literal(item) for item in value]
        return self._piece(value, False, "") if isinstance(value, str) and "${" in value else value

    def restored(self, value: Any) -> Any:
        """Return the value with the literal text in place of the marks."""
        if isinstance(value, dict):
            return {key: self.restored(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.restored(item) for item in value]
        return _LITERAL.sub(lambda mark: self._texts[int(mark[1])], value) if isinstance(value, str) else value

    def _piece(self, text: str, is_linked: bool, path: str) -> str:
        if is_linked:
            self.problems += _refused_resolvers(text, path)
            return text
        self._texts.append(text)
        return f"\ue000{len(self._texts) - 1}\ue001"

    def _is_of_shell(self, inside: str) -> bool:
        if not inside:
            return True
        name = re.match(r"[A-Za-z_]\w*", inside)
        if name and inside[name.end() :][:1] in ("", "["):
            return self._lookup.get(name[0]) in (None, {}, [])
        return _OF_SHELL.match(inside) is not None


def _pieces(text: str, is_of_shell: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text, and for each whether it is an interpolation of OmegaConf."""
    begin = place = 0
    while (start := text.find("${", place)) >= 0 and (end := _end(text, start)) is not None:
        slashes = len(text[begin:start]) - len(text[begin:start].rstrip("\\"))
        before = text[begin : start - slashes] + "\\" * (slashes // 2)
        if slashes % 2:  # escaped
            yield before + "${", False
            begin = place = start + 2
        elif is_of_shell(text[start + 2 : end - 1].strip()):
            place = end
        else:
            if before:
                yield before, False
            yield text[start:end], True
            begin = place = end
    if text[begin:]:
        yield text[begin:], False


def _end(text: str, start: int) -> int | None:
    """Return the index behind the brace that closes the one of `${` at `start`; None if it is not closed."""
    depth = 0
    for i in range(start + 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return None


def _refused_resolvers(text: str, path: str) -> Iterator[str]:
    for name in dict.fromkeys(_RESOLVER.findall(text)):
        if name not in RESOLVERS:
            yield (
                f"{path}: {text}: unknown resolver {name!r}; known: {', '.join(RESOLVERS)}; write \\${{...}} for text "
                "that a shell expands"
            )


# --- OmegaConf


def _by_omegaconf(tree: Tree, lookup: Tree, linked: dict[str, str]) -> Tree:
    """Return the tree with the interpolations at the paths in `linked` resolved; other sections are not copied."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    OmegaConf.register_new_resolver("hpc_det", lambda name: str(data_path(name)), replace=True)
    OmegaConf.register_new_resolver("now", datetime.now().strftime, replace=True)
    own = {key: value for key, value in tree.items() if key not in _LAYERS}
    sections = {re.split(r"[.\[]", path)[0] for path in linked}
    try:
        with bounded(len(linked)):
            root = OmegaConf.create({**lookup, _CONFIG: own})
            found = {key: OmegaConf.to_container(root[key], resolve=True) for key in _LAYERS if key in sections}
            if sections - set(_LAYERS):
                found |= cast(Tree, OmegaConf.to_container(root[_CONFIG], resolve=True))
    except OmegaConfBaseException as error:
        raise UsageError(problem_of(error)) from None
    unset = [f"{path}: {text} is not set" for path, text in linked.items() if _is_unset(text, _at(found, path))]
    if unset:
        raise UsageError(unset)
    return {key: found[key] if key in sections else value for key, value in tree.items()}


def _is_unset(text: str, value: Any) -> bool:
    """Return whether an interpolation of another key has no value. In the free-form sections, null is a value."""
    key = re.fullmatch(r"\$\{(\w+)\.[\w.]+\}", text)
    return value is None and key is not None and key[1] not in FREE_FORM


def _at(tree: Any, path: str) -> Any:
    for key in re.findall(r"[^.\[\]]+", path):
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key)
    return tree


def problem_of(error: Exception) -> str:
    """Return the message of an error of OmegaConf: the key, and the first line of the reason."""
    first, *_rest = str(error).splitlines() or [type(error).__name__]
    if error.__cause__ is not None:
        first += f": {str(error.__cause__).splitlines()[0]}"
    if re.search(r"no viable alternative|mismatched input|extraneous input|token recognition", first):
        first += "; this is no interpolation; write \\${...} for text that a shell expands"
    full_key = (getattr(error, "full_key", None) or "").removeprefix(f"{_CONFIG}.")
    return f"{full_key}: {first}" if full_key else first


# --- secrets


def _refuse_shown_secrets(tree: Tree, sources: dict[str, str]) -> None:
    """Raise UsageError for each value that contains a secret of the environment and would be shown in clear."""
    named = {name for text in sources.values() for name in _VARIABLE.findall(text) if looks_secret(name)}
    hidden = {name: os.environ[name] for name in sorted(named) if len(os.environ.get(name, "")) >= SHORTEST}
    problems = []
    for path, text in sources.items():
        own = [name for name in _VARIABLE.findall(text) if name in named]
        shown = [value for place, value in texts(tree) if place == path or place.startswith((f"{path}.", f"{path}["))]
        used = own or [name for name, secret in hidden.items() if any(secret in value for value in shown)]
        if used and not is_masked_at(tree, path):
            problems.append(
                f"{path}: the value of {used[0]} looks like a secret, and this key is shown and stored in clear; put "
                f"it below data.secrets, or into environment.environment_variables as {used[0]}=${{oc.env:{used[0]}}}"
            )
    if problems:
        raise UsageError(problems)


# --- a bound on interpolations: sixty lines of `"${above}${above}"` expand to 2^60 characters, and OmegaConf takes as
# many steps to resolve them

MOST_REPEATED = 5_000
"""Largest number of resolved interpolations in addition to those that are written in the files."""
_CHARS = 1000
"""Number of characters of a resolved string that count as one more interpolation."""
_only_one = Lock()
"""The lock for `bounded`, which replaces a method of a class and so must not run in two threads at once."""


@contextmanager
def bounded(written: int) -> Iterator[None]:
    """Return a context in which OmegaConf raises an error, with the key, instead of building a very large tree.

    `written`: number of interpolations in the files.
    """
    # OmegaConf resolves every interpolation, also nested ones and those of resolvers, by resolve_parse_tree.
    from omegaconf.base import Container

    left = written + MOST_REPEATED

    def counted(self: Container, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        _check(left)
        found = resolve(self, *args, **kwargs)
        left -= len(found) // _CHARS if isinstance(found, str) else 0
        _check(left)
        return found

    with _only_one:
        resolve = Container.resolve_parse_tree
        Container.resolve_parse_tree = counted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


def _check(left: int) -> None:
    from omegaconf.errors import InterpolationResolutionError

    if left < 0:
        raise InterpolationResolutionError(
            f"interpolations (such as ${{name}}) repeat more than {MOST_REPEATED} values up to here; write the "
            f"values out, or put them into a file that the trial reads"
        )
