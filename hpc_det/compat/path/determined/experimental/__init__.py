"""`determined.experimental`: of its contents only `core_v2` has a counterpart."""

from __future__ import annotations

from typing import Any

from hpc_det.compat.aliases import missing


def __getattr__(name: str) -> Any:
    raise AttributeError(missing(f"{__name__}.{name}"))
