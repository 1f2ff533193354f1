"""State as JSON: whole files, files of appended lines, and what they must hold, since a disk may damage them, or a
person edit them.

The shape of a file names a kind of value for each key. A kind is an annotation: a class, `list[str]`, `int | None`, a
Literal, a dataclass or a Shape for a map with these keys. `Moment` stands for seconds since the epoch, `Count` for how
many things a process can hold.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_det.errors import HpcDetError, shown
from hpc_det.node import disk, full_disk
from hpc_det.node.files import flush_folder, open_file, write_atomic

BLOCK_BYTES = 2**20
Made = TypeVar("Made")
Shape = Mapping[str, Any]
"""The keys that a map must have, and the kinds of their values."""


class DamagedFile(HpcDetError, ValueError):
    """A file holds what hpc_det has not written."""


class Moment:
    """Seconds since the epoch."""


class Count:
    """How many things there are, all of them in memory."""


NUMBER = (int, float)
_LATEST = 1e11
"""Years that no clock shows; localtime(3) knows no later ones than some."""
_LONGEST, _LARGEST, _MOST = 2**63, 10**300, 10**7
"""A whole number fits into 64 bits, as arrays hold it; a metric may be larger, as long as it can be a float."""


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
def append_lines(path: Path, records: Sequence[dict[str, Any]], *, durable: bool = True) -> None:
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


def parsed(text: str | bytes, where: object) -> Any:
    """What the JSON `text` of a file says. Raises DamagedFile."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{where}: damaged: it is no JSON ({shown(str(error))})") from None


def checked(data: Any, shape: Shape, where: object) -> dict[str, Any]:
    """The map as it is. Raises DamagedFile where it is none, or not of this shape. `where`: the file."""
    if not isinstance(data, dict):
        raise DamagedFile(f"{where}: damaged: {shown(data)} is no map")
    if problem := problem_of(shape, data):
        raise DamagedFile(f"{where}: damaged: {problem}")
    return data


def made(kind: type[Made], data: Any, where: object) -> Made:
    """The dataclass from the map that a file holds; other keys are of a newer version. Raises DamagedFile."""
    known = checked(data, _shape(kind), where)  # type: ignore[arg-type]
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    more = {name: value for name, value in known.items() if name in names}
    hints = _hints(kind)  # type: ignore[arg-type]
    if problem := problem_of({name: hints[name] for name in more}, more):
        raise DamagedFile(f"{where}: damaged: {problem}")
    return kind(**more)


def insist_on(shape: Shape, record: Mapping[str, Any], where: object) -> None:
    """Raises DamagedFile for a line that its writer cannot have written. `where`: the file."""
    if problem := problem_of(shape, record):
        raise DamagedFile(
            f"{where}: damaged: {problem} in the line {shown(dict(record))}, which hpc_det has not written; remove "
            f"that line"
        )


def problem_of(shape: Shape, record: Mapping[str, Any]) -> str:
    """What is wrong with the map, or nothing."""
    for key, kind in shape.items():
        if key not in record:
            return f"it has no {key}"
        if not fits(record[key], kind):
            return f"{key} is {shown(record[key])}"
    return ""


def fits(value: Any, kind: Any) -> bool:
    """Whether `value`, as JSON holds it, is of this kind."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and not problem_of(kind, value)
    if check := _PLAIN.get(kind):
        return check(value)
    if isinstance(kind, tuple):
        return any(fits(value, one) for one in kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    if is_dataclass(kind):
        return isinstance(value, dict) and not problem_of(_shape(kind), value)  # type: ignore[arg-type]
    return isinstance(value, kind)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LONGEST


def _is_number(value: Any) -> bool:
    return (type(value) is int and abs(value) < _LARGEST) or (isinstance(value, float) and abs(value) < float("inf"))


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    Any: lambda value: True,
    str: lambda value: isinstance(value, str),
    dict: lambda value: isinstance(value, dict),
    int: _is_whole,
    NUMBER: _is_number,
    float: _is_number,
    Count: lambda value: type(value) is int and 0 <= value < _MOST,
    Moment: lambda value: _is_number(value) and 0 <= value < _LATEST,
    NoneType: lambda value: value is None,
}


@cache
def _hints(kind: type) -> Shape:
    return get_type_hints(kind)


@cache
def _shape(kind: type) -> Shape:
    """The fields that have no default."""
    hints = _hints(kind)
    required = (field.name for field in fields(kind) if field.default is field.default_factory is MISSING)
    return {name: hints[name] for name in required}
