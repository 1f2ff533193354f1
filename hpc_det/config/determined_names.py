"""The names of the package `determined` that hpc_det provides, read from the source of hpc_det's own modules.

Nothing is imported, since most of these modules import torch, which the login side never loads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

COUNTERPARTS = {
    "pytorch": "hpc_det.pytorch",
    "launch": "hpc_det.launch",
    "core": "hpc_det.compat.det_core",
    "transformers": "hpc_det.compat.det_transformers",
    "lightning": "hpc_det.compat.det_lightning",
    "experimental.core_v2": "hpc_det.compat.det_core_v2",
}
"""Packages of Determined, and the packages of hpc_det to which they are mapped, with all their modules."""
_PACKAGE = Path(__file__).parents[1]
_PATH = _PACKAGE / "compat" / "path"
"""The folder with the package `determined`, whose files come before the counterparts."""


def missing_part(name: str) -> str | None:
    """Return the shortest part of `name` that hpc_det lacks, such as determined.keras of determined.keras.callbacks.

    `name`: a module of Determined, or an attribute of one. None if hpc_det has it, and below a class or function.
    """
    parts = name.split(".")
    for i in range(1, len(parts)):
        part = ".".join(parts[: i + 1])
        if not is_module(part):
            is_known = parts[i].startswith("__") or parts[i] in names_of(".".join(parts[:i]))
            return None if is_known else part
    return None


def is_module(name: str) -> bool:
    """Return whether hpc_det has a module for this one of Determined's."""
    return _place(name) is not None


@cache
def names_of(module: str) -> frozenset[str]:
    """Return the names that the source of Determined's `module` binds here, without its submodules."""
    place = _place(module)
    return frozenset(_bound(place)) if place and place.is_file() else frozenset()


def _place(module: str) -> Path | None:
    """Return the file of the module, or its folder if that has no __init__.py; None if hpc_det has no such module."""
    below = module.partition(".")[2]
    places = [_PATH / module.replace(".", "/")]
    for package in sorted(COUNTERPARTS, key=len, reverse=True):
        if below == package or below.startswith(f"{package}."):
            places.append(_place_of(COUNTERPARTS[package] + below.removeprefix(package)))
    return next((file for place in places for file in _files(place) if file.exists()), None)


def _files(place: Path) -> tuple[Path, ...]:
    return place / "__init__.py", place.with_suffix(".py"), place


def _place_of(module: str) -> Path:
    """Return the path of a module of hpc_det without its suffix."""
    return _PACKAGE.parent / module.replace(".", "/")


def _listed(file: Path) -> list[str]:
    """Return `__all__` of a file."""
    (names,) = (
        node.value
        for node in ast.parse(file.read_bytes()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return [*ast.literal_eval(names)]


def _bound(file: Path) -> Iterator[str]:
    for node in ast.parse(file.read_bytes()).body:
        match node:
            case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")]):
                yield from _listed(next(path for path in _files(_place_of(module)) if path.exists()))
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield name
            case ast.Assign() | ast.AnnAssign():
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                parts = (part for target in targets for part in ast.walk(target))
                yield from (part.id for part in parts if isinstance(part, ast.Name))
