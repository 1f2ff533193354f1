"""The small files of ranks in one archive, and loading files of ranks from wherever `node_folders` places them."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile, ZipInfo

from hpc_det.checkpoint.content import load, read
from hpc_det.checkpoint.node_folders import SMALL_FILES, covers, is_node_folder


def packed(files: Mapping[str, bytes]) -> bytes:
    """Return an archive of the files, which are not compressed."""
    archive = BytesIO()
    write_archive(archive, files)
    return archive.getvalue()


def unpacked(archive: bytes) -> dict[str, bytes]:
    with ZipFile(BytesIO(archive)) as files:
        return {name: files.read(name) for name in files.namelist()}


def write_archive(file: IO[bytes], files: Mapping[str, bytes]) -> None:
    """Write an archive of the files to `file`, which only needs `write` and `flush`."""
    with ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(ZipInfo(name), content)


# --- loading


@dataclass(frozen=True)
class StoredFile:
    """A file of a rank in a checkpoint."""

    path: Path
    """The file, or the archive that contains it."""
    member: str | None = None
    """Its name in the archive."""

    def load(self) -> Any:
        """Return its content, as `content.load` does."""
        return load(self.path if self.member is None else self._member())

    def read_mapped(self) -> Any:
        """Return its content, as `content.read` does; tensors of a large file are read when they are used."""
        if self.member is None:
            return read(self.path, mmap=True)
        return read(self.path, content=self._member())

    def _member(self) -> BytesIO:
        assert self.member is not None
        with ZipFile(self.path) as archive:
            return BytesIO(archive.read(self.member))


class RankFiles:
    """The files of the ranks in the folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with os.scandir(folder) as entries:
            self._nodes = sorted(entry.name for entry in entries if is_node_folder(entry.name))

    def find(self, name: str) -> StoredFile | None:
        """Return the file `name` of a rank, or None if the checkpoint has none."""
        if (self._folder / name).exists():
            return StoredFile(self._folder / name)
        node = next((self._folder / node for node in self._nodes if covers(node, name)), None)
        return next((file for file in _in_node(node, name)), None) if node else None

    def load(self, name: str) -> Any:
        """Return the content of the file `name` of a rank. Raises FileNotFoundError."""
        if found := self.find(name):
            return found.load()
        raise FileNotFoundError(2, os.strerror(2), str(self._folder / name))

    def every(self, pattern: str) -> Iterator[StoredFile]:
        """Yield the files of all ranks that match the pattern; an archive is opened when its files are needed."""
        for path in sorted(self._folder.glob(pattern)):
            yield StoredFile(path)
        for node in self._nodes:
            yield from _in_node(self._folder / node, pattern)


def _in_node(folder: Path, pattern: str) -> Iterator[StoredFile]:
    for path in sorted(folder.glob(pattern)):
        yield StoredFile(path)
    if (archive := folder / SMALL_FILES).exists():
        with ZipFile(archive) as files:
            names = fnmatch.filter(files.namelist(), pattern)
        for name in names:
            yield StoredFile(archive, name)
