"""Secrets stay out of what is shown and stored to be read. The job gets them by plan.json and trial.json, mode 0600."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

from hpc_det.config.merge import Tree

MASK = "********"
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_STORAGE_SECRETS = ("access_key", "secret_key", "connection_string", "credential")


def masked(tree: Tree) -> Tree:
    """A copy of a config, whole or in part, without the values of its secrets.

    Those are `data.secrets`, environment variables whose names say so, the keys of a store of checkpoints, and what
    opens a registry of images. A config that is not valid may lose more.
    """
    shown = copy.deepcopy(tree)
    _mask(shown, "data", "secrets", _hidden)
    _mask(shown, "environment", "environment_variables", _variables)
    _mask(shown, "environment", "registry_auth", _hidden)
    for key in _STORAGE_SECRETS:
        _mask(shown, "checkpoint_storage", key, _hidden)
    return shown


def _mask(tree: Tree, section: str, key: str, mask: Callable[[Any], Any]) -> None:
    found = tree.get(section)
    if isinstance(found, dict) and found.get(key) is not None:
        found[key] = mask(found[key])


def _hidden(value: Any) -> Any:
    return {key: _hidden(item) for key, item in value.items()} if isinstance(value, dict) else MASK


def _variables(written: Any) -> Any:
    """A list of NAME=value, or such a list for each kind of device."""
    if isinstance(written, dict):
        return {name: _variables(items) for name, items in written.items()}
    return [_variable(item) for item in written] if isinstance(written, list) else MASK


def _variable(item: Any) -> str:
    if not isinstance(item, str):
        return MASK
    name, equals, value = item.partition("=")
    return f"{name}{equals}{MASK if _NAMES.search(name) else value}"
