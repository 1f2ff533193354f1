"""Importing a folder's modules without leaving them: two folders may both have a `model_def`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Within, modules of `folder` are found there, whatever else has their names; afterwards all is as it was before.

    The standard library and hpc_det come first. A folder that does not exist has no modules.
    """
    names = _modules_in(folder)
    path, writes_bytecode = [*sys.path], sys.dont_write_bytecode
    others = {name: module for name, module in sys.modules.items() if _root(name) in names}
    for name in others:
        del sys.modules[name]
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # the folder stays as it is
    importlib.invalidate_caches()  # it may be younger than Python's last look at it
    try:
        yield
    finally:
        for name, module in [*sys.modules.items()]:
            if name not in before and (_root(name) in names or _lies_in(folder, module)):
                del sys.modules[name]
        sys.modules.update(others)
        sys.path[:] = path
        sys.dont_write_bytecode = writes_bytecode


def _modules_in(folder: Path) -> set[str]:
    stems = {path.name.partition(".")[0] for path in folder.glob("*")}
    return {name for name in stems - sys.stdlib_module_names - {"hpc_det"} if _is_found_in(folder, name)}


def _is_found_in(folder: Path, name: str) -> bool:
    """Python prefers a package elsewhere to a mere folder here: it may hold data, and be called `datasets`."""
    here = PathFinder.find_spec(name, [str(folder)])
    if here is None or here.origin is not None:
        return here is not None
    anywhere = PathFinder.find_spec(name, [str(folder), *sys.path])
    is_loaded = getattr(sys.modules.get(name), "__file__", None) is not None
    return not is_loaded and anywhere is not None and anywhere.origin is None


def _lies_in(folder: Path, module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).is_relative_to(folder)


def _root(name: str) -> str:
    return name.partition(".")[0]
