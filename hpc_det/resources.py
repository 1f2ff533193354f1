"""The location of the data folders: at the top of a checkout, or inside the package of an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
COMPAT_PATH = Path(__file__).with_name("compat") / "path"
"""The folder with the package `determined` (hpc_det.compat)."""


def data_path(name: str) -> Path:
    """Return the path of the folder `name`, which is "conf", "slurm_templates" or "docs/examples"."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.exists() else _PACKAGE.parent / name
