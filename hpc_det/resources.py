"""Where the data folders beside the package lie: in a checkout at its top, in an installed wheel inside the package."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def data_path(name: str) -> Path:
    """The folder `name`: "conf", "slurm_templates" or "docs/examples"."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.exists() else _PACKAGE.parent / name
