"""Count the calls of this process that change files or read folders and attributes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CALLS = ("open", "mkdir", "stat", "lstat", "scandir", "listdir", "rename", "replace", "unlink", "rmdir", "fsync")


@contextmanager
def file_calls(below: Path) -> Iterator[Counter[str]]:
    """Yield a Counter of the calls by name, with paths at or below `below`; all of fsync.

    Calls on a file that is open, such as writes, are not counted: only fsync waits for a server of metadata.
    """
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        call = getattr(os, name)

        def counted_call(*args: Any, **options: Any) -> Any:
            path = args[0] if args else "."
            if name == "fsync" or (not isinstance(path, int) and Path(os.fspath(path)).is_relative_to(below)):
                counted[name] += 1
            return call(*args, **options)

        return counted_call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counting(name))
        yield counted
