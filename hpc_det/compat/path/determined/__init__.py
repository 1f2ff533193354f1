"""Determined's own top-level names. Everything below comes from hpc_det by way of hpc_det.compat.aliases."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hpc_det.compat.aliases import COUNTERPARTS, Finder, missing
from hpc_det.compat.cluster_info import ClusterInfo, TrialInfo, get_cluster_info
from hpc_det.errors import InvalidHP

__all__ = ["LOG_FORMAT", "ClusterInfo", "InvalidHP", "TrialInfo", "__version__", "get_cluster_info"]

__version__ = "0.38.1"
"""Determined's last release: what models that ask for a version want to hear."""

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""For logging.basicConfig; upstream's logs are searched by it, here it is a format like any other."""


def __getattr__(name: str) -> Any:
    if name in COUNTERPARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(f"{__name__}.{name}"))


def _mention_another() -> None:
    """Who has the real package installed reads that it is not this one."""
    own = Path(__file__).parents[1]
    other = PathFinder.find_spec("determined", [folder for folder in sys.path if Path(folder) != own])
    if other and other.origin:
        print(f"hpc-det: `determined` is hpc_det in this process, not {other.origin}", file=sys.stderr)


sys.meta_path.append(Finder())
_mention_another()
