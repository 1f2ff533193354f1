"""The two ways in which state reaches the disk: a whole file by atomic rename, and one appended line.

Rename without a flush of the file and of its folder is the classic crash bug (Pillai et al., OSDI '14, ALICE), so both
are flushed here. Nothing takes a lock: NFS breaks them.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from hpc_det.node import disk, full_disk
from hpc_det.node.modes import PRIVATE_FILE, open_file
from hpc_det.node.shape import DamagedFile, Shape, checked, parsed
from hpc_det.node.temporary import temporary_beside

BLOCK_BYTES = 2**20
FLUSHES = 16
"""At the same time."""

P = ParamSpec("P")
T = TypeVar("T")

flush_folder = disk.flush_folder


def _written_twice(write: Callable[P, T]) -> Callable[P, T]:
    """For a process that was suspended for so long that another one has removed its half-written file
    (`hpc_det.node.temporary`).
    """

    @wraps(write)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return write(*args, **kwargs)
        except FileNotFoundError:
            return write(*args, **kwargs)

    return again


@full_disk.tried_again
@_written_twice
def write_atomic(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace `path` by a file with `content`: a reader sees the old one or the new, never a part.

    It is for whom its folder is (hpc_det.node.modes), or for its owner alone.
    """
    partial = _written_beside(path, content, private)
    try:
        disk.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise
    flush_folder(path.parent)


@full_disk.tried_again
@_written_twice
def write_first(path: Path, content: str | bytes) -> bool:
    """Make `path`, whole, on disk and for its owner alone; False where it is there already.

    Of many processes one succeeds, on NFS too (open(2), O_EXCL).
    """
    partial = _written_beside(path, content, private=True)
    try:
        disk.link(partial, path)
    except FileExistsError:
        # An answer of NFS may be lost and the call repeated: then the name that exists is this very file's.
        if os.stat(partial).st_nlink != 2:
            return False
    finally:
        disk.unlink(partial, missing_ok=True)
    flush_folder(path.parent)
    return True


def _written_beside(path: Path, content: str | bytes, private: bool) -> Path:
    """A file with `content`, on disk, under a name of its own in the folder of `path`."""
    partial = temporary_beside(path)
    try:
        write_flushed(partial, content, private=private)
    except OSError as error:
        error.filename = str(path)  # the one that a reader knows
        raise
    return partial


def write_flushed(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Make the file `path`, whole and on disk, or none; its name is durable when its folder is flushed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = disk.open_descriptor(path, flags, PRIVATE_FILE) if private else open_file(path, flags)
    try:
        disk.write_all(descriptor, content.encode() if isinstance(content, str) else content)
        disk.flush(descriptor)
    except BaseException as error:
        _remove(path)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _remove(partial: Path) -> None:
    """After an error, which another one shall not hide."""
    with suppress(OSError):
        disk.unlink(partial)


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    write_atomic(path, json.dumps(data, indent=1, allow_nan=False) + "\n", private=private)


def read_json(path: Path) -> Any | None:
    """The content of `path`, or None where there is no such file. Raises DamagedFile."""
    try:
        found = parsed(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    if found is None:
        raise DamagedFile(f"{path}: damaged: it holds nothing")
    return found


def read_map(path: Path, shape: Shape = MappingProxyType({})) -> dict[str, Any] | None:
    """The same of a file that holds a map. Raises DamagedFile, also where it is not of this shape."""
    found = read_json(path)
    return None if found is None else checked(found, shape, path)


def append_line(path: Path, record: dict[str, Any], *, durable: bool = True) -> None:
    """Append one JSON line to `path`: see `append_lines`."""
    append_lines(path, [record], durable=durable)


@full_disk.tried_again
def append_lines(path: Path, records: Iterable[dict[str, Any]], *, durable: bool = True) -> None:
    """Append JSON lines to `path`, which has one writer, at once. A line torn by a crash is ended first.

    Not `durable`: on disk at the next `flush_file`, and in sight of other processes at once. The name of a new file is
    durable before its first line, since fsync of a file alone promises nothing about its name (fsync(2)).
    """
    lines = b"".join(json.dumps(record, allow_nan=False).encode() + b"\n" for record in records)
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = None
    try:
        size = os.fstat(descriptor).st_size
        if not size:
            flush_folder(path.parent)
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        if disk.write(descriptor, lines) < len(lines):
            raise OSError(errno.ENOSPC, "no space left for whole lines", str(path))
        if durable:
            disk.flush(descriptor)
    except OSError as error:
        if size is not None:
            _cut(descriptor, size)
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def _cut(descriptor: int, size: int) -> None:
    """Lines that could not be written, or flushed, are none: their writer tries again, and each counts once. A server
    may say only at the flush that its disk is full.
    """
    with suppress(OSError):
        disk.truncate(descriptor, size)


def open_log(path: Path) -> int:
    """The descriptor of a file that processes print to, one after the other or together."""
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def flush_file(path: Path) -> None:
    """Make what was written to `path` durable; nothing where there is no such file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        disk.flush(file.fileno())


def flush_tree(folder: Path) -> None:
    """Make `folder` and all files and folders below it durable, several at a time: a flush is mostly waiting."""
    folders: list[Path] = [folder]
    files: list[Path] = []
    for path in folder.rglob("*"):
        (folders if path.is_dir() else files).append(path)
    with ThreadPoolExecutor(FLUSHES) as threads:
        list(threads.map(flush_file, files))
        list(threads.map(flush_folder, folders))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole JSON line of `path`; torn ones are left out, and a missing file has none."""
    return list(each_line(path))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The same of a file of which each line counts, and counts once. Raises DamagedFile for a line that was whole and
    cannot be read: one that a crash has torn has no end, and is the last one, or was ended by the line after it.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = {line: parse_line(line) for line in lines if line.strip()}
    for number, line in enumerate(lines, start=1):
        was_whole = b"}" in line[-2:] or (number == len(lines) - 1 and not lines[-1])
        if was_whole and line.strip() and found[line] is None:
            raise DamagedFile(f"{path}: damaged: line {number} cannot be read; remove it, or restore the file")
    return [record for record in found.values() if record is not None]


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """The same, one at a time: the file may be larger than memory allows."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if (record := parse_line(line)) is not None:
                yield record


def blocks(path: Path) -> Iterator[bytes]:
    """The content of `path` in blocks of about `BLOCK_BYTES` that end with a line; a missing file has none."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block + file.readline()


def newest_first(path: Path) -> Iterator[bytes]:
    """The lines of `path`, the last one first, read as far as the caller asks for; a missing file has none."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        end, rest = file.seek(0, os.SEEK_END), b""
        while end:
            begin = max(end - BLOCK_BYTES, 0)
            file.seek(begin)
            rest, *lines = (file.read(end - begin) + rest).split(b"\n")
            yield from reversed(lines)
            end = begin
        yield rest


def read_counted(path: Path, count: str) -> list[dict[str, Any]]:
    """The lines of a file in which line[count] rises: one that does not makes those void that are not below it.

    So does whoever goes on from an earlier state, and writes to the same file what comes now.
    """
    found: list[dict[str, Any]] = []
    for line in read_lines(path):
        while found and found[-1][count] >= line[count]:
            found.pop()
        found.append(line)
    return found


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """A line of JSON; None for one that a crash has torn, and for anything but a map."""
    try:
        text = line.strip() if isinstance(line, str) else line.strip().decode()
        record, end = _raw_decode(text)  # json.loads takes twice as long for a short line
    except (ValueError, RecursionError):
        return None
    return record if end == len(text) and isinstance(record, dict) else None


_raw_decode = json.JSONDecoder().raw_decode
