"""Writing a checkpoint: every rank puts its files into a hidden partial folder, rank 0 commits it by one rename.

Order, each step durable before the next: files, manifest, the partial folder, the rename, the parent folder. A kill at
any point leaves either the old state or the new one.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from hpc_det.checkpoint.committed import MANIFEST, Committed, FileEntry, checksum, manifest_of
from hpc_det.store.files import flush_folder
from hpc_det.store.modes import make_folder


class ChecksummedFile:
    """A file object, good enough for torch.save, that knows the checksum of what went through it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc = 0
        self._size = 0

    def write(self, data: bytes) -> int:
        self._crc = zlib.crc32(data, self._crc)
        self._size += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def entry(self) -> FileEntry:
        return FileEntry(size=self._size, crc32=self._crc)


@contextmanager
def checksummed(path: Path) -> Iterator[ChecksummedFile]:
    """Write `path`; flushed to disk when the block ends."""
    with open(path, "wb") as raw:
        file = ChecksummedFile(raw)
        yield file
        raw.flush()
        os.fsync(raw.fileno())


@dataclass(frozen=True)
class Staging:
    """A checkpoint that is being written. All ranks share the uuid; each adds files of its own names."""

    checkpoints: Path
    uuid: str

    @property
    def partial(self) -> Path:
        return self.checkpoints / f".partial-{self.uuid}"

    @contextmanager
    def file(self, name: str, entries: dict[str, FileEntry]) -> Iterator[ChecksummedFile]:
        """Write `name`; flushed to disk, and its entry put into `entries`, when the block ends."""
        with checksummed(self.partial / name) as file:
            yield file
        entries[name] = file.entry

    def add_others(self, entries: dict[str, FileEntry]) -> None:
        """Take in files that somebody else, a callback, put into the partial folder, and flush them to disk."""
        for path in self.partial.rglob("*"):
            name = str(path.relative_to(self.partial))
            if path.is_dir():
                flush_folder(path)
            elif name not in entries:
                _flush_file(path)
                entries[name] = checksum(path)

    def commit(self, steps: int, entries: dict[str, FileEntry]) -> Committed:
        """Rank 0 only, when every rank's files are written. `entries` are those of all ranks."""
        checkpoint = Committed(path=self.checkpoints / self.uuid, steps=steps, time=time.time(), files=entries)
        with open(self.partial / MANIFEST, "w", encoding="utf-8") as file:
            file.write(manifest_of(checkpoint))
            file.flush()
            os.fsync(file.fileno())
        flush_folder(self.partial)
        os.rename(self.partial, checkpoint.path)
        flush_folder(self.checkpoints)
        return checkpoint


def _flush_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def new_staging(checkpoints: Path) -> Staging:
    """Rank 0 only: begin, and clear away what a killed attempt left half-done."""
    for leftover in checkpoints.glob(".partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Staging(checkpoints, str(uuid.uuid4()))
    make_folder(staging.partial)
    return staging
