"""A faster inspect.getmodule, for the time in which a process imports its modules.

Each operator that torch registers, and each use of inspect.getframeinfo, calls inspect.getmodule with a frame. That
function resolves the path of every module that was loaded since its last call, with one lstat(2) for each component:
two thirds of the file system calls of `import torch`.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def modules_from_frames() -> Iterator[None]:
    """Answer inspect.getmodule from the globals of the frame within this context.

    Where these do not identify a module and its file, and for objects other than frames, inspect answers as always.
    """
    search = inspect.getmodule

    def getmodule(object: Any, _filename: str | None = None) -> types.ModuleType | None:
        frame = object.tb_frame if isinstance(object, types.TracebackType) else object
        if isinstance(frame, types.FrameType):
            module = sys.modules.get(frame.f_globals.get("__name__", ""))
            # A module may execute code of another file, or under another module's name; inspect goes by the file.
            own_file = getattr(module, "__file__", None)
            if module and vars(module) is frame.f_globals and own_file == frame.f_code.co_filename:
                return module
        return search(object, _filename)

    inspect.getmodule = getmodule
    try:
        yield
    finally:
        if inspect.getmodule is getmodule:  # else a library has replaced it, and its replacement may call this one
            inspect.getmodule = search
