"""An append-only log with many writers on many nodes, without locks.

Entry N is a file with that name, created by link(2), which succeeds for only one process, on NFS too (open(2), O_EXCL).
A process that loses the race reads that entry and tries the next number. An entry is complete and flushed before it
gets its name, so that a kill at any point leaves either nothing or the whole entry.

A thousand entries form a chunk. When a chunk is full, it is also written to one file, which is faster to read, and the
process that appended its last entry deletes the files of the single entries. Processes may write the file of a chunk at
the same time, because all of them write the same content.
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
from hpc_det.node.json_files import DamagedFile, checked, json_lines, parse_line, parsed

CHUNK = 1000
"""Number of entries in a chunk."""


class SharedLog:
    """A log in one folder, read and written by this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._position = 0
        self._chunk: list[str] = []
        """The lines of the current chunk that this process has read or written."""

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the entries since the last call, oldest first. Raises DamagedFile."""
        while (lines := self._read()) is not None:
            for line in lines:
                entry = self._parsed(line)
                self._advance(line)
                yield entry

    def _parsed(self, line: str) -> dict[str, Any]:
        """Return the next entry, which is in this line. Raises DamagedFile, and NewerFormat, for its file."""
        try:
            if (entry := parse_line(line, self._folder)) is not None:
                return entry
        except DamagedFile:
            pass
        file = self.file_of(self._position)  # only now: it looks at the disk
        entry = parse_line(line, file)
        return checked(parsed(line, file), {}, file) if entry is None else entry  # says what is wrong

    def append(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        """Append `entry`; return it after the entries that other processes appended since the last call."""
        (line,) = json_lines(self._folder, [entry], is_begin=not self._position)
        partial = disk.temporary_beside(self._entry())
        before: list[dict[str, Any]] = []
        try:
            _write(partial, line, self._entry())
            while True:
                before += self.new()
                try:
                    if _named(partial, self._entry()) and not self._came_too_late(line):
                        break
                except FileNotFoundError:  # another process deleted it as abandoned while this one was suspended
                    _write(partial, line, self._entry())
        finally:
            disk.unlink(partial, missing_ok=True)
        flush_folder(self._folder)
        self._advance(line)
        # True if this entry was the last one of its chunk
        if not self._chunk and self._sealed(self._position - CHUNK).exists():
            self._delete_small_ones()
        return [*before, json.loads(json.dumps(entry))]

    def file_of(self, number: int) -> Path:
        """Return the file that contains this entry."""
        sealed = self._sealed(number)
        return sealed if sealed.exists() else self._entry(number)

    def _read(self) -> list[str] | None:
        """Return the next lines; None at the end of the log."""
        small = self._read_small_ones()
        # Read after the entries, and preferred to them: once this file exists, an entry may be void (`_came_too_late`).
        sealed = _lines(self._sealed())
        lines = small if sealed is None else sealed[len(self._chunk) :]
        if sealed is not None and not lines:  # the file of a chunk is always written with all of its entries
            raise DamagedFile(f"{self._sealed()}: damaged: expected {CHUNK} lines, got {len(sealed)}")
        return lines or None

    def _read_small_ones(self) -> list[str]:
        """Return the lines of the current chunk's next entries, up to the first one that does not exist."""
        found: list[str] = []
        for number in range(self._position, self._position // CHUNK * CHUNK + CHUNK):
            entry = _lines(self._entry(number))
            if entry is None:
                break
            if not entry:
                raise DamagedFile(f"{self._entry(number)}: damaged: the file is empty")
            found += entry
        return found

    def _advance(self, line: str) -> None:
        self._chunk.append(line)
        self._position += 1
        if len(self._chunk) == CHUNK:
            with suppress(OSError):  # for instance a full or read-only disk: the files of the single entries remain
                self._seal(self._sealed(self._position - CHUNK))
            self._chunk = []

    def _seal(self, path: Path) -> None:
        if is_own(self._folder) and not path.exists():  # other users only read
            write_atomic(path, "\n".join(self._chunk) + "\n")

    def _came_too_late(self, line: str) -> bool:
        """Return whether the entry is void, and delete it then.

        It is void if its name was free only because the chunk is full and the files of its entries were deleted.
        """
        sealed = _lines(self._sealed())
        if sealed is None or sealed[len(self._chunk)] == line:
            return False
        disk.unlink(self._entry(), missing_ok=True)
        return True

    def _entry(self, number: int | None = None) -> Path:
        return self._folder / f"{self._position if number is None else number:09}.json"

    def _sealed(self, number: int | None = None) -> Path:
        """Return the file of the chunk that contains this entry."""
        first = (self._position if number is None else number) // CHUNK * CHUNK
        return self._folder / f"{first:09}-{first + CHUNK - 1:09}.jsonl"

    def _delete_small_ones(self) -> None:
        for number in range(self._position - CHUNK, self._position):
            disk.unlink(self._entry(number), missing_ok=True)


@full_disk.tried_again
def _write(partial: Path, line: str, entry: Path) -> None:
    try:
        write_flushed(partial, line + "\n")
    except OSError as error:
        error.filename = str(entry)  # the temporary name means nothing to a user
        raise


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
        # An NFS client repeats a call whose answer was lost. Then the name exists, and is a link to this file.
        return os.stat(partial).st_nlink == 2
    return True
