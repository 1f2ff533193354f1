"""The file of a rank with its state at each batch, which `hpc-det experiment verify-resume` compares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hpc_det.node.files import make_folder
from hpc_det.node.json_files import append_line
from hpc_det.store.folders import TrialFolder


class TraceFile:
    """The trace of one rank, to which an attempt appends a line for each batch."""

    def __init__(self, folder: TrialFolder, rank: int, attempt: int) -> None:
        self._file = folder.resume_trace(rank)
        self._attempt = attempt
        self._first: int | None = None
        """Number of the first batch of this attempt; None before it."""
        make_folder(self._file.parent)

    def write(self, batch: int, **parts: Any) -> None:
        """Append the line of batch number `batch`."""
        if self._first is None:
            self._first = batch
        line = {"batch": batch, "attempt": self._attempt, "first": batch == self._first, **parts}
        append_line(self._file, line, durable=False)


class UsersCode:
    """The user's modules: those in a folder, and modules named beforehand."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._folders = (f"{folder}/", f"{folder.resolve()}/")
        self._modules = modules

    def contains(self, module: str | None, file: str | None) -> bool:
        """Return whether a module with this name and file is the user's."""
        return module in self._modules or (file or "").startswith(self._folders)

    def modules(self) -> Iterator[ModuleType]:
        """Yield the user's modules that are imported."""
        for name, module in sys.modules.copy().items():  # other threads import, too
            if self.contains(name, getattr(module, "__file__", None)):
                yield module
