"""Writing a checkpoint: every rank puts its files into a hidden partial folder, rank 0 commits it by one rename."""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpc_det.checkpoint.committed import FORMAT, Committed, checksum
from hpc_det.checkpoint.reading import open_regular
from hpc_det.checkpoint.sealed_files import SealedFile, sealed_file
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.files import flush_folder, make_folder, make_folders, set_mode, write_atomic


@dataclass(frozen=True)
class Staging:
    """A checkpoint that is being written. All ranks share the uuid; each adds files of its own names."""

    checkpoints: Path
    uuid: str

    @property
    def partial(self) -> Path:
        return self.checkpoints / f".partial-{self.uuid}"

    @contextmanager
    def file(
        self, name: str, entries: dict[str, FileEntry], go_on: Callable[[], object] = lambda: None
    ) -> Iterator[SealedFile[FileEntry]]:
        """Write `name`, which may be below folders; flushed to disk, and its entry put into `entries`, when the block
        ends. `go_on` is asked before each block, and raises to end it.
        """
        path = self.partial / name
        make_folders(path.parent)
        with sealed_file(path, CRC, go_on) as file:
            yield file
        entries[name] = file.entry

    def add_others(self, entries: dict[str, FileEntry]) -> None:
        """Take in files that somebody else, a callback, put into the partial folder, and flush them to disk."""
        for path in sorted(self.partial.rglob("*")):  # a folder comes before what is in it
            name = str(path.relative_to(self.partial))
            if path.is_symlink():
                _replace_link(path)
            if path.is_dir():
                set_mode(path)
                flush_folder(path)
            elif name not in entries:
                entries[name] = _flushed(path)

    def commit(self, steps: int, entries: dict[str, FileEntry], *, after: float = 0.0) -> Committed:
        """Rank 0 only, when every rank's files are written. `entries` are those of all ranks. `after`: the time of the
        checkpoint that it supersedes, maybe by the clock of another node.
        """
        now = max(time.time(), math.nextafter(after, math.inf))
        checkpoint = Committed(path=self.checkpoints / self.uuid, steps=steps, time=now, files=entries)
        FORMAT.commit(self.partial, checkpoint.path, checkpoint.manifest)
        return checkpoint


def _flushed(path: Path) -> FileEntry:
    """The entry of a file that others made. Raises HpcDetError for what cannot be in a checkpoint, as a FIFO."""
    try:
        set_mode(path)
        with open_regular(path) as file:
            disk.flush(file.fileno())
        return checksum(path)
    except OSError as error:
        raise HpcDetError(f"{path}: cannot become part of a checkpoint: {error.strerror}") from None


def _replace_link(path: Path) -> None:
    """By a copy of what it leads to: a checkpoint holds all that it needs. Raises HpcDetError for no file."""
    if not path.is_file():
        raise HpcDetError(
            f"{path}: a symbolic link to {os.readlink(path)}, which is no file, cannot become part of a checkpoint; "
            f"write the files themselves"
        )
    write_atomic(path, path.read_bytes())


def new_staging(checkpoints: Path) -> Staging:
    """Rank 0 only: begin one, where no other is being written."""
    clear_leftovers(checkpoints)
    staging = Staging(checkpoints, str(uuid.uuid4()))
    make_folder(staging.partial)
    return staging


def clear_leftovers(checkpoints: Path) -> None:
    """What a killed attempt, or a save that was given up, left half-done."""
    for leftover in checkpoints.glob(".partial-*"):
        disk.remove_tree(leftover)
