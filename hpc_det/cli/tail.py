"""Files that grow while they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


class Tail:
    """The new lines of a file at each call; the file may come later, and may be replaced by another one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def lines(self) -> Iterator[str]:
        """Whole lines without their end."""
        with suppress(FileNotFoundError), open(self._path, "rb") as file:
            self._continue(os.fstat(file.fileno()))
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line.removesuffix(b"\n").decode(errors="replace")

    def _continue(self, found: os.stat_result) -> None:
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset = found.st_ino, 0
