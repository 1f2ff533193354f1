"""Masking secrets in what is shown, or stored for others. A job reads them from files that only its owner can read."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpc_det.config.merge import Tree, leaves
from hpc_det.errors import shown

MASK = "********"
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Parts of the names of variables whose values are taken for secrets."""
_SETS = re.compile(rf"\w*({_NAMES.pattern})\w*=", re.IGNORECASE)
"""Matches a line of shell code that sets a variable with such a name."""
_STORAGE_SECRETS = ("access_key", "secret_key", "connection_string", "credential")
_SECTIONS = re.compile(
    r"(cluster\.(environment_variables|experiment|setup)|environment|data|checkpoint_storage|notify|loggers)\b"
)
"""Settings that may contain secrets."""
_SECRET_PATHS = re.compile(
    rf"data\.secrets|environment\.registry_auth|checkpoint_storage\.({'|'.join(_STORAGE_SECRETS)})"
    r"|notify(\[\d+\])?(\.webhook|$)"
)
_SUSPICIOUS = re.compile(rf"{_NAMES.pattern}|registry_auth|connection_string|webhook", re.IGNORECASE)
SHORTEST = 6
"""Characters that a value needs to be taken for a secret: shorter ones, such as 1 or true, occur in other words."""
_USERINFO = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#@]*@", re.IGNORECASE)
"""Matches the beginning of a URL with a user name or password before its host."""


def masked(tree: Tree) -> Tree:
    """Return a copy of a configuration, or of a part of it, without its secrets.

    These are `data.secrets`, environment variables with a name such as ..._KEY, the keys of an object store,
    `registry_auth` and addresses of webhooks. More may be removed from an invalid configuration.
    """
    shown = copy.deepcopy(tree)
    _mask(shown, "data", "secrets", _hidden)
    _mask(shown, "environment", "environment_variables", _variables)
    _mask(shown, "environment", "registry_auth", _hidden)
    for key in _STORAGE_SECRETS:
        _mask(shown, "checkpoint_storage", key, _hidden)
    if shown.get("notify") is not None:
        shown["notify"] = _hooks(shown["notify"])
    return shown


def masked_profile(profile: Tree) -> Tree:
    """Return a copy of a cluster profile without the secrets in its jobs' environment."""
    return {
        **profile,
        "environment_variables": masked_variables(profile["environment_variables"]),
        "setup": masked_lines(profile["setup"]),
    }


def masked_variables(written: Iterable[str]) -> list[str]:
    """Return a list of NAME=value with the secrets masked."""
    return [_variable(item) for item in written]


def masked_lines(lines: Iterable[str]) -> list[str]:
    """Return lines of shell code with the secrets masked."""
    return [MASK if _SETS.search(str(line)) else line for line in lines]


def shown_at(path: str, value: Any) -> str:
    """Return the repr of `value` for a message; a mask if it is a secret, or may contain one.

    `path` is the setting whose value it is. The value may be invalid, such as a map in place of a text, so in sections
    with secrets a suspicious word, or a URL with a password, anywhere in it is enough.
    """
    if not _SECTIONS.match(path):
        return shown(value)
    variable = re.match(r"\w+\W", value) if isinstance(value, str) else None
    if variable and _NAMES.search(variable[0]):
        return repr(f"{variable[0]}{MASK}")
    text = f"{path} {value}"
    is_secret = _SECRET_PATHS.match(path) or _SUSPICIOUS.search(text) or _USERINFO.search(text)
    return repr(MASK) if is_secret else shown(value)


def without_secrets(text: str, env: Mapping[str, str]) -> str:
    """Return the text of a library without the values of variables such as ..._KEY, and without passwords in URLs."""
    for name, value in env.items():
        if len(value) >= SHORTEST and _NAMES.search(name):
            text = text.replace(value, MASK)
    return _USERINFO.sub(rf"\1{MASK}@", text)


def looks_secret(name: str) -> bool:
    """Return whether an environment variable of this name is taken for a secret."""
    return _NAMES.search(name) is not None


def masked_layers(tree: Tree) -> Tree:
    """Return a copy of a configuration, whose keys `cluster` and `template` have the layers below it, without secrets.

    The layers need not be valid.
    """
    shown = masked({key: value for key, value in tree.items() if key not in ("cluster", "template")})
    for key in ("cluster", "template"):
        if key in tree:
            layer = copy.deepcopy(tree[key])
            shown[key] = _LAYERS[key](layer) if isinstance(layer, dict) else layer
    return shown


def _masked_cluster(profile: Tree) -> Tree:
    masks = {"environment_variables": masked_variables, "setup": masked_lines}
    lists = {key: mask(profile[key]) for key, mask in masks.items() if isinstance(profile.get(key), list)}
    experiment = profile.get("experiment")
    return {**profile, **lists, **({"experiment": masked(experiment)} if isinstance(experiment, dict) else {})}


_LAYERS: dict[str, Callable[[Tree], Tree]] = {"cluster": _masked_cluster, "template": masked}


def masked_paths(tree: Tree) -> list[str]:
    """Return the paths at which a mask replaces a secret, without environment variables."""
    return [path for path, value in leaves(tree) if value == MASK]


def masked_names(variables: Iterable[str]) -> list[str]:
    """Return the variables whose value is a mask; the last one of a name counts."""
    values = dict(item.split("=", 1) for item in variables)
    return [name for name, value in values.items() if value == MASK]


def _mask(tree: Tree, section: str, key: str, mask: Callable[[Any], Any]) -> None:
    found = tree.get(section)
    if isinstance(found, dict) and found.get(key) is not None:
        found[key] = mask(found[key])


def _hidden(value: Any) -> Any:
    return {key: _hidden(item) for key, item in value.items()} if isinstance(value, dict) else MASK


def _variables(written: Any) -> Any:
    """Return a list of NAME=value, or such lists by type of device, with the secrets masked."""
    if isinstance(written, dict):
        return {name: _variables(items) for name, items in written.items()}
    return masked_variables(written) if isinstance(written, list) else MASK


def _variable(item: Any) -> str:
    if not isinstance(item, str):
        return MASK
    name, equals, value = item.partition("=")
    return f"{name}{equals}{MASK if _NAMES.search(name) else value}"


def _hooks(written: Any) -> Any:
    return [_hook(hook) for hook in written] if isinstance(written, list) else MASK


def _hook(written: Any) -> Any:
    if not isinstance(written, dict):
        return MASK
    return {key: MASK if key == "webhook" and value is not None else value for key, value in written.items()}
