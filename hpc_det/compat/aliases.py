"""determined.X is hpc_det.X under another name, for every X that has a counterpart."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

COUNTERPARTS = ("pytorch", "launch")
"""Packages of Determined that are packages of hpc_det, with all that is below them."""


class Alias(ModuleType):
    """Another name of `module`. Its attributes are that module's own, so that isinstance and issubclass hold."""

    def __init__(self, name: str, module: ModuleType) -> None:
        super().__init__(name, module.__doc__)
        self._module = module
        if hasattr(module, "__path__"):
            self.__path__: list[str] = []  # or the files below would be found, and executed a second time

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError:
            raise AttributeError(missing(f"{self.__name__}.{name}")) from None

    def __dir__(self) -> list[str]:
        return dir(self._module)


class Finder:
    """On sys.meta_path behind all others, so that it is asked for what no file in `path/determined` answers."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, below = name.partition(".")
        if root != "determined" or not below:
            return None
        found = importlib.util.find_spec(f"hpc_det.{below}") if below.split(".")[0] in COUNTERPARTS else None
        if found is None:
            # Without its `name` this error passes `from determined import keras`, which would hide the message.
            raise ModuleNotFoundError(missing(name))
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, AliasLoader(found), origin=found.origin, is_package=is_package)


class AliasLoader(InspectLoader):
    def __init__(self, real: ModuleSpec) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> Alias:
        return Alias(spec.name, importlib.import_module(self._real.name))

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name."""

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python3 -m determined.launch.torch_distributed`."""
        assert isinstance(self._real.loader, InspectLoader)
        return self._real.loader.get_code(self._real.name)

    def get_source(self, fullname: str) -> str | None:
        assert isinstance(self._real.loader, InspectLoader)
        return self._real.loader.get_source(self._real.name)


def missing(name: str) -> str:
    """What somebody reads who asked for a name that only Determined has."""
    return f"{name}: hpc_det has no counterpart; docs/porting.md says what it has, and what to do without the rest"
