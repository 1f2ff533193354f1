"""The files of an experiment that hold secrets: for its owner alone, and for colleagues a copy with the secrets masked.

The copies are in `masked/` beside them, under the same names, and only of a shared experiment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpc_det.node.files import is_shared, make_folder
from hpc_det.node.json_files import DamagedFile, parsed, write_json
from hpc_det.store.folders import ExperimentFolder


def write_secrets(path: Path, data: Any, masked: Any) -> None:
    """`masked`: the same without the secrets."""
    write_json(path, data, private=True)
    if is_shared(path.parent):
        copy = _copy(path)
        make_folder(copy.parent)
        write_json(copy, masked)


def read_text(path: Path) -> str:
    """The file or, for whom it is not, its copy. Raises DamagedFile."""
    try:
        try:
            return path.read_text(encoding="utf-8")
        except PermissionError:
            return _copy(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path}: damaged: {error}") from None


def read_secrets(path: Path) -> Any | None:
    """The content of the file or, for whom it is not, of its copy; None where there is no such file.

    Raises DamagedFile.
    """
    try:
        return parsed(read_text(path), path)
    except FileNotFoundError:
        return None


def _copy(path: Path) -> Path:
    return ExperimentFolder(path.parent).masked / path.name
