"""The name under which a checkpoint records the class of its trial, and the class of that name.

A class that a script defines belongs to the module `__main__`, which another process cannot import. It is recorded
under the name by which Python imports the script, and `trial_in_main` is set (both as Determined does).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from hpc_det.checkpoint.committed import LOAD_DATA
from hpc_det.errors import UsageError
from hpc_det.pytorch.trial.trial import PyTorchTrial, Trial

_MAIN = "__main__"


# --- recorded


def recorded_class(trial_class: type[Trial], code: Path | None) -> dict[str, Any]:
    """Return the entries of load_data.json that name a class. `code`: folder of the experiment's code, if known."""
    module, in_main = trial_class.__module__, trial_class.__module__ == _MAIN
    if in_main:
        module = _importable_name(code) or _MAIN
    return {
        "trial_cls_spec": f"{module}:{trial_class.__qualname__}",
        **({"trial_in_main": True} if in_main else {}),
    }


def _importable_name(code: Path | None) -> str | None:
    """Return the name by which Python imports the script that is running, or None, as in a notebook.

    `python3 -m NAME` has the name already. A script is imported from the folder of the code that contains it, or else
    from its own folder.
    """
    main = sys.modules[_MAIN]
    if spec := getattr(main, "__spec__", None):
        return str(spec.name)
    file = getattr(main, "__file__", None)
    if file is None:
        return None
    script = Path(file).resolve()
    inside = code is not None and script.is_relative_to(code.resolve())
    parts = (script.relative_to(code.resolve()) if code and inside else Path(script.name)).with_suffix("").parts
    return ".".join(parts) if all(part.isidentifier() for part in parts) else None


# --- found


def class_of(about: Mapping[str, Any], folder: Path) -> type[PyTorchTrial]:
    """Return the class that `about` (load_data.json) names. Raises UsageError if it cannot be imported.

    A script is imported only if it trains under `if __name__ == "__main__"`, because its import would train otherwise.
    """
    name = about.get("trial_cls_spec")
    if not isinstance(name, str) or ":" not in name:
        raise UsageError(f"{folder / LOAD_DATA}: does not name the trained class; pass it as trial_class")
    module_name, _, qualified_name = name.partition(":")
    if module_name in ("", _MAIN):
        raise UsageError(f"{folder}: {name} was defined in a script of unknown name; pass the class as trial_class")
    try:
        if about.get("trial_in_main"):
            _check_importable(module_name, name, folder)
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(f"{folder}: cannot import {name}: {error}; {_remedy(error)}") from error
    try:
        found = attrgetter(qualified_name)(module)
    except AttributeError:
        raise UsageError(
            f"{folder}: {module.__file__} has no {qualified_name}; pass the class as trial_class"
        ) from None
    if not (isinstance(found, type) and issubclass(found, PyTorchTrial)):
        raise UsageError(f"{folder}: {name} is not a subclass of hpc_det.pytorch.PyTorchTrial; pass one as trial_class")
    return found


def _check_importable(module_name: str, name: str, folder: Path) -> None:
    """Raise UsageError if the import of a script might train. Raises ImportError if there is no such script."""
    spec = importlib.util.find_spec(module_name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {module_name!r}", name=module_name)
    if spec.origin and not has_main_guard(Path(spec.origin).read_text(encoding="utf-8")):
        raise UsageError(
            f'{folder}: {name} is defined in a script, {spec.origin}, which has no `if __name__ == "__main__":` and '
            f"would train when it is imported; pass the class as trial_class"
        )


def has_main_guard(source: str) -> bool:
    """Return whether a script has an `if __name__ == "__main__":` at its top level. Raises SyntaxError."""
    return any(
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and isinstance(node.test.ops[0], ast.Eq)
        and {"__name__", repr(_MAIN)} == {ast.unparse(node.test.left), ast.unparse(node.test.comparators[0])}
        for node in ast.parse(source).body
    )


def _remedy(error: ImportError) -> str:
    if (error.name or "").split(".")[0] == "determined":
        return "call hpc_det.compat.install() first, so that the code imports hpc_det instead"
    return "install what it imports, or pass the class as trial_class"
