"""Where a user's state lives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def state_root(env: Mapping[str, str]) -> Path:
    """`$HPC_DET_ROOT`, or `~/hpc_det`."""
    configured = env.get("HPC_DET_ROOT")
    return Path(configured).expanduser().absolute() if configured else Path.home() / "hpc_det"
