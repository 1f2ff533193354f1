"""Secrets stay out of what is shown and stored to be read. The job gets them by plan.json and trial.json, mode 0600."""

from __future__ import annotations

import copy
import re

from hpc_det.config.merge import Tree

MASK = "********"
_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def masked(tree: Tree) -> Tree:
    """A copy of an effective config: `data.secrets`, and environment variables whose names say so, without values."""
    shown = copy.deepcopy(tree)
    secrets = shown["data"].get("secrets")
    if isinstance(secrets, dict):
        shown["data"]["secrets"] = dict.fromkeys(secrets, MASK)
    environment = shown["environment"]
    variables = environment["environment_variables"]
    if isinstance(variables, dict):
        environment["environment_variables"] = {device: _masked(items) for device, items in variables.items()}
    else:
        environment["environment_variables"] = _masked(variables)
    return shown


def _masked(variables: list[str]) -> list[str]:
    split = (item.partition("=") for item in variables)
    return [f"{name}={MASK if _NAMES.search(name) else value}" for name, _, value in split]
