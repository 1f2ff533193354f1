"""`ray.util`: of its modules, `sgd` and `client` have counterparts."""

from __future__ import annotations

import importlib
from typing import Any

from hpc_det.compat.aliases import missing


def __getattr__(name: str) -> Any:
    if name in ("client", "sgd"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(f"{__name__}.{name}"))
