"""The top-level names of the package `ray`; its submodules are resolved by hpc_det.compat.aliases."""

from __future__ import annotations

import importlib
from typing import Any

from hpc_det.compat.aliases import enable, missing
from hpc_det.compat.ray_core import (
    available_resources,
    cluster_resources,
    get,
    init,
    is_initialized,
    kill,
    put,
    remote,
    shutdown,
    wait,
)

__all__ = [
    "__version__",
    "available_resources",
    "cluster_resources",
    "get",
    "init",
    "is_initialized",
    "kill",
    "put",
    "remote",
    "shutdown",
    "wait",
]

__version__ = "1.8.0"
"""The last release of Ray with RaySGD's TorchTrainer, for programs that check the version."""


def __getattr__(name: str) -> Any:
    if name in ("tune", "util"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(f"{__name__}.{name}"))


enable("ray")
