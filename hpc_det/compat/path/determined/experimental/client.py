"""`determined.experimental.client`: see hpc_det.compat.experimental_client."""

from __future__ import annotations

from typing import Any

from hpc_det.compat.aliases import missing
from hpc_det.compat.experimental_client import *  # noqa: F403
from hpc_det.compat.experimental_client import __all__ as __all__


def __getattr__(name: str) -> Any:
    raise AttributeError(missing(f"{__name__}.{name}"))
