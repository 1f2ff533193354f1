"""An append-only log with many writers on many nodes, and no lock.

Entry N is a file of that name, made by link(2), which succeeds for one process only, on NFS too (open(2), O_EXCL). Who
comes second reads that entry and takes the next number. An entry is whole and on disk before it gets its name, so a
kill at any byte leaves either nothing or all of it. Where a thousand entries are full, the process that wrote the last
of them writes them all into one file, for quick reading, and deletes the small ones; two that do so write the same.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_det.store.files import flush_folder, write_atomic

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
                self._advance(line)
                yield json.loads(line)

    def append(self, entry: dict[str, Any]) -> bool:
        """Whether `entry` is the next entry now. If not, somebody was faster: take in what is `new`, then try again."""
        line = json.dumps(entry, allow_nan=False)
        partial = self._folder / f".{uuid.uuid4().hex}"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
            if not _named(partial, self._entry()) or self._came_too_late(line):
                return False
        finally:
            partial.unlink(missing_ok=True)
        flush_folder(self._folder)
        self._advance(line)
        if not self._chunk:
            self._delete_small_ones()
        return True

    def _read(self) -> list[str] | None:
        """The next lines; None at the end of the log."""
        for path, skip in ((self._sealed(), len(self._chunk)), (self._entry(), 0), (self._sealed(), len(self._chunk))):
            # The sealed file is asked for again, since it may have taken the place of the entry in between.
            with suppress(FileNotFoundError):
                return path.read_text(encoding="utf-8").splitlines()[skip:]
        return None

    def _advance(self, line: str) -> None:
        self._chunk.append(line)
        self._position += 1
        if len(self._chunk) == CHUNK:
            if not self._sealed(self._position - CHUNK).exists():
                write_atomic(self._sealed(self._position - CHUNK), "\n".join(self._chunk) + "\n")
            self._chunk = []

    def _came_too_late(self, line: str) -> bool:
        """Whether the name was free only because the chunk had been full, and its small files deleted."""
        try:
            sealed = self._sealed().read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        self._entry().unlink(missing_ok=True)
        return sealed[len(self._chunk)] != line

    def _entry(self, number: int | None = None) -> Path:
        return self._folder / f"{self._position if number is None else number:09}.json"

    def _sealed(self, number: int | None = None) -> Path:
        """The file of the whole chunk that holds this entry."""
        first = (self._position if number is None else number) // CHUNK * CHUNK
        return self._folder / f"{first:09}-{first + CHUNK - 1:09}.jsonl"

    def _delete_small_ones(self) -> None:
        for number in range(self._position - CHUNK, self._position):
            self._entry(number).unlink(missing_ok=True)


def _named(partial: Path, entry: Path) -> bool:
    try:
        os.link(partial, entry)
    except FileExistsError:
        # An answer of NFS may be lost and the call repeated: then the name that exists is this very file's.
        return os.stat(partial).st_nlink == 2
    return True
