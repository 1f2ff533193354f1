"""OmegaConf's interpolations in experiment files, with the same meaning in `experiment create` and `hpc-det run`.

`${key.path}` is the value of another key, after the merge with the template; `${resolver:...}` is allowed for the
resolvers in `RESOLVERS`. `${NAME}` stays as it is for the shell if no key of this name is set, as do the shell's other
forms such as `${NAME:-default}`. `\\${` stands for `${`. Environment variables are those of the submission.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Any, cast

from hpc_det.config.checks import FREE_FORM
from hpc_det.config.interpolation_text import pieces, refused_resolvers
from hpc_det.config.merge import Tree, join, leaves, merge, merge_layers
from hpc_det.config.secrets import looks_secret, masked, masked_layers
from hpc_det.errors import UsageError
from hpc_det.resources import data_path

_LAYERS = ("cluster", "template")
"""The keys below which a tree has the layers under the experiment's own configuration."""
_CONFIG = "__config__"
_MARK = re.compile("\ue000(\\d+)\ue001")
"""Matches what stands for a piece of literal text, or for a secret, while OmegaConf resolves the rest."""


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
    marks = _Marks(merge(below or {}, _merged(tree)))
    marked: Tree = marks.marked(tree, "", masked_layers(tree))
    if marks.problems:
        raise UsageError(marks.problems)
    linked = {path: text for path, text in texts(marked) if "${" in text}
    lookup = merge(marks.literal(below or {}, "", masked(below or {})), _merged(marked))
    values = _by_omegaconf(marked, lookup, linked, marks) if linked else marked
    result: Tree = marks.restored(values)
    if problems := [*_shown_secrets(values, _is_clear(result, masked_layers(result)), "", marks)]:
        raise UsageError(problems)
    sources = {path: text for path, text in texts(tree) if path in linked or "\\${" in text}
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


def unresolved_notes(tree: Tree, origins: Mapping[str, str]) -> Iterator[str]:
    """Yield a note for each `${NAME}` that stays as it is, was not written as `\\${NAME}`, and that no shell expands.

    `origins`: the origin of each value, with the text that it was written with, by path.
    """
    read = {key: tree.get(key) for key in _NO_SHELL}
    if isinstance(entrypoint := tree.get("entrypoint"), list) and "-c" not in entrypoint:
        read["entrypoint"] = entrypoint
    for path, text in texts(read):
        if (found := re.search(r"\$\{(\w+)(:\s*-?\d[^}]*)?\}", text)) and "\\${" not in origins.get(path, ""):
            yield f"{path}: {found[0]} stays as it is: no key {found[1]!r} is set, and no shell reads this value"


def _merged(tree: Tree) -> Tree:
    """Return the configuration in which interpolations look up their values."""
    own = {key: value for key, value in tree.items() if key not in _LAYERS}
    below = [_section(tree.get("cluster")).get("experiment"), tree.get("template")]
    layers = [(name, _section(layer)) for name, layer in zip(("cluster", "template"), below, strict=True)]
    return {**merge_layers([*layers, ("config", own)]).tree, **{key: tree[key] for key in _LAYERS if key in tree}}


def _section(value: Any) -> Tree:
    return value if isinstance(value, dict) else {}


# --- marks


class _Marks:
    """Marks for what OmegaConf must not read: literal text that looks like an interpolation, and secrets.

    A secret is a value that is masked where it is written, or that of an environment variable such as ..._KEY. Its mark
    shows into which values it is copied.
    """

    def __init__(self, lookup: Tree) -> None:
        self._lookup = lookup
        self._values: list[Any] = []
        self._secrets: dict[int, str] = {}
        self.problems: list[str] = []

    def marked(self, value: Any, path: str, shown: Any) -> Any:
        """Return the value with a mark for each secret and each piece of literal text that OmegaConf could misread.

        `shown`: the value with masks in place of its secrets.
        """
        if isinstance(value, dict | list):
            return _each(value, path, shown, self.marked)
        secret = path if _is_secret(value, shown) else None
        if not isinstance(value, str) or not ("${" in value or "\ue000" in value):
            return self._mark(value, secret) if secret else value
        return "".join(self._piece(*piece, path, secret) for piece in pieces(value, path, self._is_set))

    def literal(self, value: Any, path: str, shown: Any) -> Any:
        """Return the value with a mark in place of each secret, and of each text that looks like an interpolation."""
        if isinstance(value, dict | list):
            return _each(value, path, shown, self.literal)
        secret = path if _is_secret(value, shown) else None
        return self._mark(value, secret) if secret or (isinstance(value, str) and "${" in value) else value

    def variable(self, name: str, *default: Any) -> str | None:
        """Return an environment variable, or a mark for it; the resolver `oc.env`."""
        from omegaconf.resolvers import oc

        value = oc.env(name, *default)
        is_secret = name in os.environ and looks_secret(name)
        return self._mark(value, name) if is_secret or "\ue000" in (value or "") else value

    def restored(self, value: Any) -> Any:
        """Return the value with what the marks stand for."""
        if isinstance(value, dict):
            return {key: self.restored(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.restored(item) for item in value]
        if not isinstance(value, str):
            return value
        if whole := _MARK.fullmatch(value):
            return self._values[int(whole[1])]
        return _MARK.sub(lambda mark: str(self._values[int(mark[1])]), value)

    def secrets(self, text: object) -> list[str]:
        """Return the variables and paths of the secrets in a text with marks."""
        return [self._secrets[int(i)] for i in _MARK.findall(str(text)) if int(i) in self._secrets]

    def in_words(self, message: str) -> str:
        """Return a message of OmegaConf with the names of secrets, and literal text, in place of the marks."""
        message = message.replace("\\ue000", "\ue000").replace("\\ue001", "\ue001")
        return _MARK.sub(lambda mark: self._secrets.get(int(mark[1]), str(self._values[int(mark[1])])), message)

    def _piece(self, text: str, is_linked: bool, path: str, secret: str | None) -> str:
        if is_linked:
            self.problems += refused_resolvers(text, path)
            return text
        return self._mark(text, secret)

    def _mark(self, value: Any, secret: str | None) -> str:
        if secret:
            self._secrets[len(self._values)] = secret
        self._values.append(value)
        return f"\ue000{len(self._values) - 1}\ue001"

    def _is_set(self, name: str) -> bool:
        return _has_value(self._lookup.get(name))


def _has_value(value: Any) -> bool:
    """Return whether a key is set: a map of which no key is set is what conf/config.yaml has for each section."""
    return any(map(_has_value, value.values())) if isinstance(value, dict) else value is not None and value != []


_HIDDEN = object()


def _is_secret(value: Any, shown: Any) -> bool:
    return value is not None and value != shown


def _each(value: Any, path: str, shown: Any, marked: Callable[[Any, str, Any], Any]) -> Any:
    """Return a map or list with `marked` applied to each element. `shown`: the value without secrets."""
    if isinstance(value, dict):
        by_key = shown if isinstance(shown, dict) else {}
        return {key: marked(item, join(path, key), by_key.get(key, _HIDDEN)) for key, item in value.items()}
    each = shown if isinstance(shown, list) else [_HIDDEN] * len(value)
    return [marked(item, f"{path}[{i}]", each[i]) for i, item in enumerate(value)]


# --- OmegaConf


def _by_omegaconf(tree: Tree, lookup: Tree, linked: dict[str, str], marks: _Marks) -> Tree:
    """Return the tree with the interpolations at the paths in `linked` resolved; other sections are not copied."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    own = {key: value for key, value in tree.items() if key not in _LAYERS}
    sections = {re.split(r"[.\[]", path)[0] for path in linked}
    try:
        with bounded(len(linked)), _resolvers(marks):
            root = OmegaConf.create({**lookup, _CONFIG: own})
            found = {key: OmegaConf.to_container(root[key], resolve=True) for key in _LAYERS if key in sections}
            if sections - set(_LAYERS):
                found |= cast(Tree, OmegaConf.to_container(root[_CONFIG], resolve=True))
    except OmegaConfBaseException as error:
        raise UsageError(marks.in_words(problem_of(error))) from None
    except RecursionError:
        path = max(linked, key=lambda path: linked[path].count("${"))
        raise UsageError(f"{path}: interpolations are nested too deeply; write the value out") from None
    values = dict(leaves(found))
    unset = [f"{path}: {text} is not set" for path, text in linked.items() if _is_unset(text, values.get(path, text))]
    if unset:
        raise UsageError(unset)
    return {key: found[key] if key in sections else value for key, value in tree.items()}


@contextmanager
def _resolvers(marks: _Marks) -> Iterator[None]:
    """Return a context in which OmegaConf has the resolvers of experiment files."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def decoded(text: Any, *, _parent_: Any, _node_: Any) -> Any:
        if names := marks.secrets(text):
            raise ValueError(f"{names[0]} is a secret, which is always text; use it without oc.decode")
        return oc.decode(text, _parent_, _node_)

    own: dict[str, Callable[..., Any]] = {
        "oc.env": marks.variable,
        "oc.decode": decoded,
        "hpc_det": _folder,
        "now": datetime.now().strftime,
    }
    for name, resolver in own.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
        OmegaConf.register_new_resolver("oc.decode", oc.decode, replace=True)


def _folder(*name: str) -> str:
    if len(name) != 1:
        raise ValueError(f"got {len(name)} folders; expected one, such as ${{hpc_det:docs/examples}}")
    return str(data_path(name[0]))


def _is_unset(text: str, value: Any) -> bool:
    """Return whether an interpolation of another key has no value. In the free-form sections, null is a value."""
    key = re.fullmatch(r"\$\{(\w+)\.[\w.]+\}", text)
    return value is None and key is not None and key[1] not in FREE_FORM


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


def _is_clear(value: Any, shown: Any) -> Any:
    """Return whether each value is shown in clear, as a tree of bools; `shown`: the value without secrets."""
    if isinstance(value, dict | list):
        return _each(value, "", shown, lambda item, _path, each: _is_clear(item, each))
    return value == shown


def _shown_secrets(value: Any, is_clear: Any, path: str, marks: _Marks) -> Iterator[str]:
    """Yield a problem for each value that contains the mark of a secret and would be shown in clear."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _shown_secrets(key, True, join(path, key), marks)
            yield from _shown_secrets(item, is_clear[key], join(path, key), marks)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _shown_secrets(item, is_clear[i], f"{path}[{i}]", marks)
    elif is_clear and (names := marks.secrets(value)):
        name = names[0]
        variable = f", or into environment.environment_variables as {name}=${{oc.env:{name}}}"
        yield (
            f"{marks.in_words(path)}: the value of {name} looks like a secret, and this key is shown and stored in "
            f"clear; put it below data.secrets{variable if name in os.environ else ''}"
        )


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
