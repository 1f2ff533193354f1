"""The location of the data folders: at the top of a checkout, or inside the package of an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
COMPAT_PATHS = {
    "determined": Path(__file__).with_name("compat") / "path",
    "ray": Path(__file__).with_name("compat") / "path_ray",
}
"""The folders with the packages `determined` and `ray` (hpc_det.compat), by the name of the package."""


def data_path(name: str) -> Path:
    """Return the path of the folder `name`, which is "conf", "slurm_templates" or "docs/examples"."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.exists() else _PACKAGE.parent / name
