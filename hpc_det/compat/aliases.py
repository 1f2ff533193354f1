"""An import hook that resolves `determined.X` or `ray.X` to a module of hpc_det for every X that has a counterpart."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hpc_det.config.determined_names import COUNTERPARTS as COUNTERPARTS
from hpc_det.config.rank_variables import DETERMINED, RAY
from hpc_det.resources import COMPAT_PATHS

RAY_COUNTERPARTS = {
    "util.sgd": "hpc_det.compat.ray_sgd",
    "util.sgd.utils": "hpc_det.compat.ray_sgd.meters",
    "tune": "hpc_det.compat.ray_tune",
    "tune.utils": "hpc_det.compat.ray_tune.helpers",
}
"""Packages of Ray, and the packages of hpc_det to which they are mapped: RaySGD, and what its programs use of Tune."""


@dataclass(frozen=True, kw_only=True)
class Root:
    """A top-level package that is imported from hpc_det."""

    counterparts: Mapping[str, str]
    page: str
    """The page of the documentation that lists alternatives to names without a counterpart."""


ROOTS = {
    DETERMINED: Root(counterparts=COUNTERPARTS, page="docs/how-to/port-from-determined.md"),
    RAY: Root(counterparts=RAY_COUNTERPARTS, page="docs/how-to/port-from-raysgd.md"),
}


class Alias(ModuleType):
    """A module object named ROOT.X whose attributes are those of the hpc_det module `module`.

    Both names yield the same classes, so isinstance and issubclass work across them.
    """

    def __init__(self, name: str, module: ModuleType) -> None:
        super().__init__(name, module.__doc__)
        self._module = module
        # Empty: with the real path, Python would find the submodules' files and execute them a second time. A module
        # that is no package has it too, so that Finder names what is missing in `from determined.core import X`.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(missing(f"{self.__name__}.{name}")) from None

    def __dir__(self) -> list[str]:
        return dir(self._module)


class Finder:
    """The finder for ROOT.X, where ROOT is `determined` or `ray`.

    It is the last entry of sys.meta_path, so that files in the folder of the root package take precedence.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, below = name.partition(".")
        if root != self._root or not below:
            return None
        found = _counterpart(ROOTS[root].counterparts, below)
        if found is None:
            # With a `name` Python would replace this error, and its message, in `from determined import keras`.
            raise ModuleNotFoundError(missing(name))
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, AliasLoader(found), origin=found.origin, is_package=is_package)


class AliasLoader(InspectLoader):
    """The loader that imports the hpc_det module and wraps it in an Alias."""

    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> Alias:
        return Alias(spec.name, importlib.import_module(self._real.name))

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: create_module has imported, and so executed, the hpc_det module."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the hpc_det module; `python3 -m determined.launch.torch_distributed` needs it."""
        assert isinstance(self._real.loader, InspectLoader)
        return self._real.loader.get_code(self._real.name)

    def get_source(self, fullname: str) -> str | None:
        assert isinstance(self._real.loader, InspectLoader)
        return self._real.loader.get_source(self._real.name)


def enable(root: str) -> None:
    """Resolve the submodules of a root package from now on; its `__init__.py` calls this.

    A line on stderr says if the real package is installed too, since it is not the one imported.
    """
    sys.meta_path.append(Finder(root))
    own = str(COMPAT_PATHS[root])
    other = PathFinder.find_spec(root, [folder for folder in sys.path if folder != own])
    if other and (place := other.origin or _code_in(other.submodule_search_locations or ())):
        print(f"hpc-det: `{root}` is hpc_det in this process, not {place}", file=sys.stderr)


def _code_in(folders: Iterable[str]) -> str | None:
    """Return the first of the folders of a package without `__init__.py` that contains Python code, or None."""
    return next((folder for folder in folders if any(Path(folder).glob("*.py"))), None)


def _counterpart(counterparts: Mapping[str, str], below: str) -> ModuleSpec | None:
    """Return the module of hpc_det for ROOT.BELOW, or None."""
    for package in sorted(counterparts, key=len, reverse=True):
        if below == package or below.startswith(f"{package}."):
            name = counterparts[package] + below.removeprefix(package)
            try:
                return importlib.util.find_spec(name)
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise
                return None  # the module above it is no package
    return None


def missing(name: str) -> str:
    """Return the message for a name that exists in Determined or Ray and not in hpc_det."""
    page = ROOTS[name.partition(".")[0]].page
    return f"{name}: hpc_det has no counterpart; {page} lists what it has instead"
