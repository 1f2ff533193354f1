"""An import hook that resolves `determined.X` to a module of hpc_det for every X that has a counterpart."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from hpc_det.config.determined_names import COUNTERPARTS as COUNTERPARTS


class Alias(ModuleType):
    """A module object named `determined.X` whose attributes are those of the hpc_det module `module`.

    Both names yield the same classes, so isinstance and issubclass work across them.
    """

    def __init__(self, name: str, module: ModuleType) -> None:
        super().__init__(name, module.__doc__)
        self._module = module
        if hasattr(module, "__path__"):
            # Empty: with the real path, Python would find the submodules' files and execute them a second time.
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(missing(f"{self.__name__}.{name}")) from None

    def __dir__(self) -> list[str]:
        return dir(self._module)


class Finder:
    """The finder for `determined.X`.

    It is the last entry of sys.meta_path, so that files in `path/determined` take precedence.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, below = name.partition(".")
        if root != "determined" or not below:
            return None
        found = _counterpart(below)
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


def _counterpart(below: str) -> ModuleSpec | None:
    """Return the module of hpc_det for `determined.BELOW`, or None."""
    for package in sorted(COUNTERPARTS, key=len, reverse=True):
        if below == package or below.startswith(f"{package}."):
            return importlib.util.find_spec(COUNTERPARTS[package] + below.removeprefix(package))
    return None


def missing(name: str) -> str:
    """Return the message for a name that exists in Determined and not in hpc_det."""
    return f"{name}: hpc_det has no counterpart; docs/how-to/port-from-determined.md lists alternatives"
