"""Where a user's state lives."""

from __future__ import annotations

import pwd
from collections.abc import Mapping
from pathlib import Path

from hpc_det.errors import UsageError

FOLDER = "hpc_det"
"""In a user's home."""


def state_root(env: Mapping[str, str]) -> Path:
    """`$HPC_DET_ROOT`, or `~/hpc_det`."""
    configured = env.get("HPC_DET_ROOT")
    return Path(configured).expanduser().absolute() if configured else Path.home() / FOLDER


def root_of(owner: str) -> Path:
    """Where the state of somebody else lives: a user's name, or the folder itself where it is not in their home.

    Raises UsageError for no such user.
    """
    if "/" in owner:
        return Path(owner).expanduser().absolute()
    try:
        return Path(pwd.getpwnam(owner).pw_dir) / FOLDER
    except KeyError:
        raise UsageError(
            f"{owner}: no user is called so; give a user's name, or the folder that is their HPC_DET_ROOT"
        ) from None
