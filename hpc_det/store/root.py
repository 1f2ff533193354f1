"""Where a user's state lives."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node.files import others_may_write

FOLDER = "hpc_det"
"""In a user's home."""


def state_root(env: Mapping[str, str]) -> Path:
    """`$HPC_DET_ROOT`, or `~/hpc_det`. Raises UsageError where others may change what is in it: jobs run that."""
    root = configured_root(env)
    if problem := danger(root):
        raise UsageError(f"HPC_DET_ROOT: {root} {': '.join(problem)}")
    return root


def configured_root(env: Mapping[str, str]) -> Path:
    """The same without a look at it."""
    configured = env.get("HPC_DET_ROOT")
    return Path(configured).expanduser().absolute() if configured else Path.home() / FOLDER


def danger(root: Path) -> tuple[str, str] | None:
    """Why others may change what the user's jobs run from `root`, and the remedy; None where they may not.

    A sticky folder such as /tmp is no better: others may make files in it, such as templates.
    """
    try:
        found = os.stat(root)
    except OSError:
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, who may change what your jobs run", "set it to a folder of yours"
    if not others_may_write(found):
        return None
    mode, is_sticky = stat.S_IMODE(found.st_mode), bool(found.st_mode & stat.S_ISVTX)
    remedy = "set it to a folder of yours" if is_sticky or found.st_uid != os.geteuid() else f"chmod go-w {root}"
    return f"has mode {mode:04o}, so others may change what your jobs run", remedy


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
