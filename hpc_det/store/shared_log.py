"""An append-only log with many writers on many nodes, and no lock.

Entry N is a file of that name, made by link(2), which succeeds for one process only, on NFS too (open(2), O_EXCL). Who
comes second reads that entry and takes the next number. An entry is whole and on disk before it gets its name, so a
kill at any byte leaves either nothing or all of it. Where a thousand entries are full, the process that wrote the last
of them writes them all into one file, for quick reading, and deletes the small ones; two that do so write the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_det.node import disk, full_disk
from hpc_det.node.files import flush_folder, is_own, write_atomic, write_flushed
from hpc_det.node.json_files import DamagedFile, checked, parsed

CHUNK = 1000


class SharedLog:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._position = 0
        self._chunk: list[str] = []
        """The lines of the chunk that is not full yet."""

    def new(self) -> Iterator[dict[str, Any]]:
        """The entries since the last call, oldest first."""
        while (lines := self._read()) is not None:
            for line in lines:
                entry = checked(parsed(line, self._entry()), {}, self._entry())
                self._advance(line)
                yield entry

    def append(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        """Write `entry`. It is the last of the answer, after those that others wrote since the last call."""
        line = json.dumps(entry, allow_nan=False)
        partial = disk.temporary_beside(self._entry())
        before: list[dict[str, Any]] = []
        try:
            _write(partial, line + "\n")
            while True:
                before += self.new()
                try:
                    if _named(partial, self._entry()) and not self._came_too_late(line):
                        break
                except FileNotFoundError:  # removed by another process: this one was suspended for long
                    _write(partial, line + "\n")
        finally:
            disk.unlink(partial, missing_ok=True)
        flush_folder(self._folder)
        self._advance(line)
        if not self._chunk and self._sealed(self._position - CHUNK).exists():
            self._delete_small_ones()
        return [*before, json.loads(line)]

    def file_of(self, number: int) -> Path:
        """The file that this entry is in."""
        sealed = self._sealed(number)
        return sealed if sealed.exists() else self._entry(number)

    def _read(self) -> list[str] | None:
        """The next lines; None at the end of the log.

        A chunk's file is asked for after its entries': where it is there, an entry may be one that came too late.
        """
        small = self._read_small_ones()
        sealed = _lines(self._sealed())
        lines = small if sealed is None else sealed[len(self._chunk) :]
        if sealed is not None and not lines:  # no process of ours leaves such a file
            raise DamagedFile(f"{self._sealed()}: nothing more is in it: it is damaged")
        return lines or None

    def _read_small_ones(self) -> list[str]:
        """Of the rest of the chunk, as far as they are there."""
        found: list[str] = []
        for number in range(self._position, self._position // CHUNK * CHUNK + CHUNK):
            entry = _lines(self._entry(number))
            if entry is None:
                break
            if not entry:
                raise DamagedFile(f"{self._entry(number)}: nothing is in it: it is damaged")
            found += entry
        return found

    def _advance(self, line: str) -> None:
        self._chunk.append(line)
        self._position += 1
        if len(self._chunk) == CHUNK:
            with suppress(OSError):  # a full disk, or one to read only: the small files are there
                self._seal(self._sealed(self._position - CHUNK))
            self._chunk = []

    def _seal(self, path: Path) -> None:
        if is_own(self._folder) and not path.exists():  # whoever else reads leaves nothing behind
            write_atomic(path, "\n".join(self._chunk) + "\n")

    def _came_too_late(self, line: str) -> bool:
        """Whether the name was free only because the chunk had been full, and its small files deleted."""
        sealed = _lines(self._sealed())
        if sealed is None or sealed[len(self._chunk)] == line:
            return False
        disk.unlink(self._entry(), missing_ok=True)
        return True

    def _entry(self, number: int | None = None) -> Path:
        return self._folder / f"{self._position if number is None else number:09}.json"

    def _sealed(self, number: int | None = None) -> Path:
        """The file of the whole chunk that holds this entry."""
        first = (self._position if number is None else number) // CHUNK * CHUNK
        return self._folder / f"{first:09}-{first + CHUNK - 1:09}.jsonl"

    def _delete_small_ones(self) -> None:
        for number in range(self._position - CHUNK, self._position):
            disk.unlink(self._entry(number), missing_ok=True)


_write = full_disk.tried_again(write_flushed)


def _lines(path: Path) -> list[str] | None:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise DamagedFile(f"{path}: damaged: {error}") from None


@full_disk.tried_again
def _named(partial: Path, entry: Path) -> bool:
    try:
        disk.link(partial, entry)
    except FileExistsError:
        # An answer of NFS may be lost and the call repeated: then the name that exists is this very file's.
        return os.stat(partial).st_nlink == 2
    return True
