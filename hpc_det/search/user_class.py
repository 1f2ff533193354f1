"""A class in the code of a trial, loaded without a trace: no folder on sys.path, no bytecode beside the file.

Whoever reads the journal of a search loads it, the command line too, often for many experiments in one process. So each
file becomes a module of its own name, and what it imports is the standard library, hpc_det.search or an installed
package, not a neighbour.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_det.errors import UsageError


def load_class(name: str, code: Path) -> type[Any]:
    """The class `module:Class` of the module's file in the folder `code`.

    Raises UsageError with what is wrong in which line.
    """
    module_name, _, class_name = name.partition(":")
    file = code.joinpath(*module_name.split(".")).with_suffix(".py")
    try:
        module = _module(file)
    except OSError as error:
        raise UsageError(
            f"{name}: {file}: {error.strerror}; it is loaded from the folder of the trial's code"
        ) from None
    except Exception as error:
        raise UsageError(f"{name}: {in_words(error, file)}") from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise UsageError(f"{name}: {file} has no class {class_name}")
    return found


def in_words(error: Exception, file: Path) -> str:
    """The error, and the last line of `file` on its way."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f" ({file}, line {lines[-1]})" if lines else f" ({file})"
    return f"{type(error).__name__}: {error}{where}"


def _module(file: Path) -> ModuleType:
    source = file.read_bytes()
    name = f"hpc_det_user_{hashlib.sha256(bytes(file) + source).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # dataclasses look their module up there
    module.__file__ = str(file)
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module
