"""The top-level names of the package `determined`; its submodules are resolved by hpc_det.compat.aliases."""

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
"""The version of Determined's last release, for models that check the version."""

LOG_FORMAT = "%(levelname)s: [%(process)s] %(name)s: %(message)s"
"""The format that models pass to logging.basicConfig. Determined searches logs by its fields; hpc_det does not."""


def __getattr__(name: str) -> Any:
    if name in COUNTERPARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(missing(f"{__name__}.{name}"))


def _mention_another() -> None:
    """Print a line to stderr if the real package is installed too, since it is not the one imported."""
    own = Path(__file__).parents[1]
    other = PathFinder.find_spec("determined", [folder for folder in sys.path if Path(folder) != own])
    if other and other.origin:
        print(f"hpc-det: `determined` is hpc_det in this process, not {other.origin}", file=sys.stderr)


sys.meta_path.append(Finder())  # last, so that the files in this folder are found first
_mention_another()
