"""OmegaConf's interpolations in experiment files, with the same meaning in `experiment create` and `hpc-det run`.

`${key.path}` is the value of another key, after the merge with the template; `${resolver:...}` is allowed for the
resolvers in `RESOLVERS`. `${NAME}` stays as it is if no key of this name is set, and wherever a shell reads the value,
as do the shell's other forms such as `${NAME:-default}`. `\\${` stands for `${`. Environment variables are those of the
submission.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from threading import Lock
from typing import Any, cast

from hpc_det.config.checks import FREE_FORM
from hpc_det.config.interpolation_marks import Marks
from hpc_det.config.merge import Tree, join, leaves, merge, merge_layers
from hpc_det.config.secrets import masked, masked_layers
from hpc_det.errors import UsageError, count
from hpc_det.resources import data_path

_LAYERS = ("cluster", "template")
"""The keys below which a tree has the layers under the experiment's own configuration."""
_CONFIG = "__config__"


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
    marks = Marks(merge(below or {}, _merged(tree)))
    marked: Tree = marks.marked(tree, "", masked_layers(tree))
    if marks.problems:
        raise UsageError(marks.problems)
    linked = {path: text for path, text in texts(marked) if "${" in text}
    lookup = merge(marks.literal(below or {}, "", masked(below or {})), _merged(marked))
    values = _by_omegaconf(marked, lookup, linked, marks) if linked else marked
    result: Tree = marks.restored(values)
    if problems := [*marks.shown_secrets(values, masked_layers(result))]:
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


# --- OmegaConf


def _by_omegaconf(tree: Tree, lookup: Tree, linked: dict[str, str], marks: Marks) -> Tree:
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
def _resolvers(marks: Marks) -> Iterator[None]:
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
        raise ValueError(f"got {count(len(name), 'folder')}; expected one, such as ${{hpc_det:docs/examples}}")
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
    unset = "Interpolation key (.+) not found"
    first = re.sub(unset, r"key \1 is not set, and a default does not count; set it", first)
    if re.search(r"no viable alternative|mismatched input|extraneous input|token recognition", first):
        first += "; this is not an interpolation; write \\${...} for text that a shell expands"
    full_key = (getattr(error, "full_key", None) or "").removeprefix(f"{_CONFIG}.")
    return f"{full_key}: {first}" if full_key else first


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
