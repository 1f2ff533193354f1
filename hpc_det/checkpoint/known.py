"""The committed checkpoints of a folder, for the process that saves there: each manifest is read once."""

from __future__ import annotations

from pathlib import Path

from hpc_det.checkpoint.committed import Committed, committed_at, folders, newest_first


class KnownCheckpoints:
    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._known: dict[str, Committed | None] = {}
        """By folder; None: it is no checkpoint."""

    def add(self, checkpoint: Committed) -> None:
        """One that this process has committed."""
        self._known[checkpoint.uuid] = checkpoint

    def all(self) -> list[Committed]:
        """The newest first, as they are there now: others may delete some."""
        self._known = {path.name: self._at(path) for path in folders(self._checkpoints)}
        return newest_first(checkpoint for checkpoint in self._known.values() if checkpoint)

    def _at(self, path: Path) -> Committed | None:
        return self._known[path.name] if path.name in self._known else committed_at(path)
