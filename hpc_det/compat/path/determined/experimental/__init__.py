"""`determined.experimental`: its client and `core_v2` have counterparts."""

from __future__ import annotations

from typing import Any

from hpc_det.compat.aliases import missing
from hpc_det.compat.experimental_client import Checkpoint, Determined, Experiment, Trial

__all__ = ["Checkpoint", "Determined", "Experiment", "Trial"]


def __getattr__(name: str) -> Any:
    raise AttributeError(missing(f"{__name__}.{name}"))
