"""Marks in a configuration for what OmegaConf must not read, and for secrets, whose copies they make visible."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from hpc_det.config.interpolation_text import pieces, refused_resolvers
from hpc_det.config.merge import Tree, join
from hpc_det.config.secrets import looks_secret

_MARK = re.compile("\ue000(\\d+)\ue001")
"""Matches what stands for a piece of literal text, or for a secret, while OmegaConf resolves the rest."""


class Marks:
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

    def shown_secrets(self, tree: Tree, shown: Tree) -> Iterator[str]:
        """Yield a problem for each value of a tree with marks that contains a secret and would be shown in clear.

        `shown`: the restored tree with masks in place of what is never shown.
        """
        for path, text in _clear_texts(tree, self.restored(tree), shown, ""):
            if names := self.secrets(text):
                yield f"{self.in_words(path)}: {_why_refused(names[0])}"

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


def _why_refused(secret: str) -> str:
    here = "and this key is shown and stored in clear"
    if secret in os.environ:
        return (
            f"the value of {secret} looks like a secret, {here}; put it below data.secrets, or into "
            f"environment.environment_variables as {secret}=${{oc.env:{secret}}}"
        )
    return f"the value of {secret} is a secret, {here}; let the code read it there, or refer to it below data.secrets"


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


def _clear_texts(value: Any, restored: Any, shown: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path of each key and scalar that is shown in clear, and its text with marks."""
    if isinstance(value, dict):
        by_key = shown if isinstance(shown, dict) else {}
        for key, item in value.items():
            yield join(path, key), key
            yield from _clear_texts(item, restored[key], by_key.get(key, _HIDDEN), join(path, key))
    elif isinstance(value, list):
        each = shown if isinstance(shown, list) else [_HIDDEN] * len(value)
        for i, item in enumerate(value):
            yield from _clear_texts(item, restored[i], each[i], f"{path}[{i}]")
    elif restored == shown:
        yield path, value
