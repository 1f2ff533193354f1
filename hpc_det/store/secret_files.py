"""The files of an experiment that hold secrets: for its owner alone, and for colleagues a copy with the secrets masked.

The copies are in `masked/` beside them, under the same names, and only of a shared experiment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_det.store.files import write_json
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.modes import is_shared, make_folder


def write_secrets(path: Path, data: Any, masked: Any) -> None:
    """`masked`: the same without the secrets."""
    write_json(path, data, private=True)
    if is_shared(path.parent):
        copy = _copy(path)
        make_folder(copy.parent)
        write_json(copy, masked)


def read_text(path: Path) -> str:
    """The file or, for whom it is not, its copy."""
    try:
        return path.read_text(encoding="utf-8")
    except PermissionError:
        return _copy(path).read_text(encoding="utf-8")


def read_secrets(path: Path) -> Any | None:
    """The content of the file or, for whom it is not, of its copy; None where there is no such file."""
    try:
        return json.loads(read_text(path))
    except FileNotFoundError:
        return None


def _copy(path: Path) -> Path:
    return ExperimentFolder(path.parent).masked / path.name
