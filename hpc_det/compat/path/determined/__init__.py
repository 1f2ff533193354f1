"""The top-level names of the package `determined`; its submodules are resolved by hpc_det.compat.aliases."""

from __future__ import annotations

import importlib
from typing import Any

from hpc_det.compat.aliases import COUNTERPARTS, enable, missing
from hpc_det.compat.cluster_info import ClusterInfo, TrialInfo, get_cluster_info
from hpc_det.errors import InvalidHP

__all__ = ["LOG_FORMAT", "ClusterInfo", "InvalidHP", "TrialInfo", "__version__", "get_cluster_info"]

__version__ = "0.38.1"
"""The version of Determined's last release, for models that check the version."""

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""The format that models pass to logging.basicConfig. Determined searches logs by its fields; hpc_det does not."""


def __getattr__(name: str) -> Any:
    if name in COUNTERPARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(f"{__name__}.{name}"))


enable("determined")
