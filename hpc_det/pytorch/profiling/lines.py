"""Measurements on their way to a file: in groups, since each write costs as much as many measurements."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpc_det.node.json_files import append_lines

WRITTEN_S = 10.0
"""Between two writes (as Determined's profiler does it)."""


class Lines:
    """Of a file that has one writer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[dict[str, Any]] = []
        self._written = time.monotonic()

    def add(self, record: dict[str, Any]) -> None:
        self._waiting.append(record)
        if time.monotonic() - self._written >= WRITTEN_S:
            self.write()

    def write(self) -> None:
        """All that wait."""
        if self._waiting:
            append_lines(self._path, self._waiting, durable=False)
            self._waiting = []
        self._written = time.monotonic()
