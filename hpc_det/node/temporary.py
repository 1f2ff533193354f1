"""Names of files and folders that are renamed when they are whole, and the removal of those whose writer was killed.

A name tells who writes: the machine with its process namespace, and the process. Where that process is gone, nobody
needs the file. What another machine has written, and what has a name of an older version, is removed when it is old.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hpc_det.node import disk
from hpc_det.node.process import place

ABANDONED_S = 3600.0
"""A file that nobody has written to for so long has no writer any more, wherever that was."""
_MARK = "hpc-det-"
_NAME = re.compile(rf"\.(?:.*\.)?{_MARK}(?P<place>.+)-(?P<process>\d+)-[0-9a-f]{{8}}")
_OLDER_NAME = re.compile(r"\.(?:.*\.)?[0-9a-f]{32}|\.code-kept-[a-z0-9_]{8}")


def temporary_beside(path: Path) -> Path:
    """A name of this process alone in the folder of `path`, for what becomes `path` by a rename or a link."""
    return path.with_name(f".{path.name}.{_MARK}{place()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")


def remove_abandoned(folders: Iterable[Path]) -> None:
    """In each of `folders`, and not below it. What cannot be removed stays."""
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in [entry for entry in entries if entry.name.startswith(".")]:
                with suppress(OSError):
                    if _is_abandoned(entry):
                        _remove(entry)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    found = _NAME.fullmatch(entry.name)
    if found and found["place"] == place():
        return not os.path.exists(f"/proc/{found['process']}")
    if not (found or _OLDER_NAME.fullmatch(entry.name)):
        return False
    return time.time() - entry.stat(follow_symlinks=False).st_mtime > ABANDONED_S


def _remove(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        disk.remove_tree(entry.path, ignore_errors=False)
    else:
        disk.unlink(entry.path)
