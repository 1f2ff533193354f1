"""The environment that the startup hook of this node left, for ranks that start with the environment of another node.

The node's agent writes two files beside its socket:

    hook-environment    the environment after the hook, as `env -0` prints it
    hook-changes        the names of the variables that the hook has set or unset
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpc_det.node.json_files import read_json

AFTER, CHANGES = "hook-environment", "hook-changes"


def changed_names(socket: str) -> list[str]:
    """Return the names of the variables that this node's hook has set or unset; none without a hook.

    `socket`: path of the agent's socket.
    """
    found: list[str] = read_json(Path(socket).with_name(CHANGES)) or []
    return found


def environment_after(socket: str, also: Iterable[str]) -> dict[str, str | None]:
    """Return the variables that this node's hook has changed, and those in `also`, with their values; None: unset.

    For a rank that was started with the environment of another node, whose hook has changed `also`. A process that srun
    has started keeps its SLURM_* variables.
    """
    names = {name for name in (*changed_names(socket), *also) if not name.startswith("SLURM_")}
    after = environment_in(Path(socket).with_name(AFTER)) if names else {}
    return {name: after.get(name) for name in sorted(names)} if after else {}


def environment_in(file: Path) -> dict[str, str]:
    """Return the environment in the output of `env -0`; empty if the container has no `env`."""
    try:
        items = file.read_bytes().split(b"\0")
    except FileNotFoundError:
        return {}
    return {name: value for name, is_set, value in (os.fsdecode(item).partition("=") for item in items) if is_set}
