"""State stored as JSON, in whole files or in files of appended lines, and checks of their content.

A disk or a person may have damaged a file, so readers check its shape, which maps each key to the kind of its value. A
kind is an annotation: a class, `list[str]`, `int | None`, a Literal, or a dataclass or a Shape for a nested object.
`Moment` is a time in seconds since the epoch, and `Count` the size of something that a process holds in memory.

Writers add the format version of the file, and readers check and remove it (hpc_det.node.format_version).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_det.errors import HpcDetError, UsageError, shown
from hpc_det.node import disk, full_disk
from hpc_det.node.files import flush_folder, open_file, write_atomic
from hpc_det.node.format_version import KEY, newest_format, with_format

BLOCK_BYTES = 2**20
"""Size of the blocks in which long files are read."""
Made = TypeVar("Made")
Shape = Mapping[str, Any]
"""The keys that an object must have, and the kinds of their values."""


class DamagedFile(HpcDetError, ValueError):
    """A file contains something that this hpc_det does not write."""


class NewerFormat(DamagedFile, UsageError):
    """A newer hpc_det wrote the file, in a format that this one does not know."""


class Moment:
    """A kind: seconds since the epoch."""


class Count:
    """A kind: a number of things that a process holds in memory, so from 0 to less than `_MOST`."""


NUMBER = (int, float)
"""A kind: a number with or without a fraction."""
_LATEST = 1e11
"""Limit of a Moment, in seconds since the epoch. localtime(3) fails for years that are too large."""
_LONGEST, _LARGEST, _MOST = 2**63, 10**300, 10**7
"""Limits of an int, of a number such as a metric, and of a Count.

An int fits into 64 bits, as in arrays; a number may be larger, as long as it can be a float.
"""


def write_json(path: Path, data: Any, *, private: bool = False) -> None:
    """Replace `path` by a file with `data` (see `write_atomic`)."""
    write_atomic(path, json_text(path, data), private=private)


def json_text(path: Path, data: Any) -> str:
    """Return the content of the file `path` with `data`, and with its format version if `data` is an object."""
    versioned = with_format(data, path) if isinstance(data, Mapping) else data
    return json.dumps(versioned, indent=1, allow_nan=False) + "\n"


def read_json(path: Path) -> Any | None:
    """Return the content of `path`, or None if the file does not exist. Raises DamagedFile, NewerFormat."""
    try:
        found = parsed(path.read_bytes(), path)
    except FileNotFoundError:
        return None
    if found is None:
        raise DamagedFile(f"{path}: damaged: it contains only null")
    return found


def read_map(path: Path, shape: Shape = MappingProxyType({})) -> dict[str, Any] | None:
    """Return the JSON object in `path`, or None if the file does not exist. Raises DamagedFile if it is not of this
    shape.
    """
    found = read_json(path)
    return None if found is None else checked(found, shape, path)


def append_line(path: Path, record: dict[str, Any], *, durable: bool = True) -> None:
    """Append one JSON line to `path`: see `append_lines`."""
    append_lines(path, [record], durable=durable)


@full_disk.tried_again
def append_lines(path: Path, records: Sequence[dict[str, Any]], *, durable: bool = True) -> None:
    """Append JSON lines to `path` with one write. The file must have only one writer.

    With `durable` False the lines are visible to other processes at once, and on disk after the next `flush_file`.
    """
    content = json_lines(path, records, is_begin=False)
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    size = None
    try:
        size = os.fstat(descriptor).st_size
        # fsync(2) of a file does not make its name durable, so flush the folder before the first line.
        if not size:
            flush_folder(path.parent)
            content = json_lines(path, records, is_begin=True)
        lines = b"".join(line.encode() + b"\n" for line in content)
        # End a line that a crash has torn, so that the new one starts at the beginning of a line.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        if disk.write(descriptor, lines) < len(lines):
            raise OSError(errno.ENOSPC, "no space left to append a whole line", str(path))
        if durable:
            disk.flush(descriptor)
    except OSError as error:
        # A file server may report a full disk only at the flush, when the lines are already in the file.
        if size is not None:
            _cut(descriptor, size)
        error.filename = error.filename or str(path)
        raise
    finally:
        os.close(descriptor)


def json_lines(path: Path, records: Sequence[dict[str, Any]], *, is_begin: bool) -> list[str]:
    """Return the lines for these records. The first line of a file has its format version (`is_begin`)."""
    if newest_format(path) > 1:
        records = [with_format(record, path) for record in records]
    elif is_begin and records:
        records = [with_format(records[0], path), *records[1:]]
    return [json.dumps(record, allow_nan=False) for record in records]


def _cut(descriptor: int, size: int) -> None:
    """Remove lines that could not be written or flushed; their writer appends them again."""
    with suppress(OSError):
        disk.truncate(descriptor, size)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return every complete JSON line of `path`, without torn ones; an empty list for a missing file."""
    return list(each_line(path))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal, equal lines once. Raises DamagedFile for a complete line that is invalid.

    A line torn by a crash has no closing brace at its end; it is the last one, or was ended by the next writer.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = {line: parse_line(line, path) for line in lines if line.strip()}
    for number, line in enumerate(lines, start=1):
        # The last line is complete only if a line end follows it; elsewhere the next writer has added the line end.
        was_whole = b"}" in line[-2:] or (number == len(lines) - 1 and not lines[-1])
        if was_whole and line.strip() and found[line] is None:
            raise DamagedFile(f"{path}: damaged: line {number} cannot be read; remove it, or restore the file")
    return [record for record in found.values() if record is not None]


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every complete JSON line of `path`, one at a time: the file may be larger than memory allows."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            if (record := parse_line(line, path)) is not None:
                yield record


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of `path` in blocks of about `BLOCK_BYTES` that end with a line; nothing for a missing file."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block + file.readline()


def newest_first(path: Path) -> Iterator[bytes]:
    """Yield the lines of `path` from the last one backwards; nothing for a missing file. Reads only what the caller
    consumes.
    """
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
    """Return the lines of a file, without each line that a later one replaces: with an equal or lower value of `count`.

    A process that resumes from an earlier state appends to the same file, so its lines replace those after that state.
    """
    found: list[dict[str, Any]] = []
    for line in read_lines(path):
        while found and found[-1][count] >= line[count]:
            found.pop()
        found.append(line)
    return found


def parse_line(line: str | bytes, file: object) -> dict[str, Any] | None:
    """Return the JSON object in a line of the file, or None if the line is torn or is anything else.

    Raises NewerFormat, and DamagedFile for what cannot be a format version.
    """
    try:
        text = line.strip() if isinstance(line, str) else line.strip().decode()
        record, end = _raw_decode(text)  # json.loads takes twice as long for a short line
    except (ValueError, RecursionError):
        return None
    if end != len(text) or not isinstance(record, dict):
        return None
    return without_format(record, file) if KEY in record else record


_raw_decode = json.JSONDecoder().raw_decode


def parsed(text: str | bytes, where: object) -> Any:
    """Return the value of the JSON `text`. `where`: the file, for the message. Raises DamagedFile, NewerFormat."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{where}: damaged: not valid JSON ({shown(str(error))})") from None
    return without_format(found, where) if isinstance(found, dict) else found


def without_format(record: dict[str, Any], file: object) -> dict[str, Any]:
    """Remove the format version from an object of the file, and return the object.

    Raises NewerFormat for a newer one than this hpc_det knows, and DamagedFile for what cannot be a format version.
    """
    version, known = record.pop(KEY, 1), newest_format(file)
    if type(version) is not int or version < 1:
        raise DamagedFile(f"{file}: damaged: {KEY} is {shown(version)}")
    if version > known:
        raise NewerFormat(
            f"{file}: has format version {version}, but this hpc_det knows versions up to {known}; upgrade hpc_det, or "
            f"use the environment of the hpc_det that wrote the file"
        )
    return record


def checked(data: Any, shape: Shape, where: object) -> dict[str, Any]:
    """Return `data`. Raises DamagedFile if it is not an object of this shape. `where`: the file, for the message."""
    if not isinstance(data, dict):
        raise DamagedFile(f"{where}: damaged: expected a JSON object, but found {shown(data)}")
    if problem := problem_of(shape, data):
        raise DamagedFile(f"{where}: damaged: {problem}")
    return data


def made(kind: type[Made], data: Any, where: object) -> Made:
    """Return the dataclass that a file's object describes. Unknown keys are ignored. Raises DamagedFile."""
    known = checked(data, _shape(kind), where)  # type: ignore[arg-type]
    # A newer version of hpc_det may have written more keys.
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    more = {name: value for name, value in known.items() if name in names}
    hints = _hints(kind)  # type: ignore[arg-type]
    if problem := problem_of({name: hints[name] for name in more}, more):
        raise DamagedFile(f"{where}: damaged: {problem}")
    return kind(**more)


def insist_on(shape: Shape, record: Mapping[str, Any], where: object) -> None:
    """Raise DamagedFile for a line that its writer cannot have written. `where`: the file, for the message."""
    if problem := problem_of(shape, record):
        raise DamagedFile(
            f"{where}: damaged: {problem} in the line {shown(dict(record))}, which hpc_det has not written; remove "
            f"that line"
        )


def problem_of(shape: Shape, record: Mapping[str, Any]) -> str:
    """Return the first problem of the object as text; "" if it has this shape."""
    for key, kind in shape.items():
        if key not in record:
            return f"the key {key} is missing"
        if not fits(record[key], kind):
            return f"{key} is {shown(record[key])}"
    return ""


def fits(value: Any, kind: Any) -> bool:
    """Return whether `value`, as json.loads returns it, is of this kind."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and not problem_of(kind, value)
    return _test(kind)(value)


@cache  # a journal has the same few kinds in 100,000 lines
def _test(kind: Any) -> Callable[[Any], bool]:
    """Return the function that returns whether a value is of this kind."""
    if check := _PLAIN.get(kind):
        return check
    if isinstance(kind, tuple):
        return _any_of(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return _any_of(inner)
    if origin is Literal:
        return lambda value: value in inner
    if origin in (list, tuple):
        return lambda value: isinstance(value, list) and all(fits(item, inner[0]) for item in value)
    if origin is dict:
        return lambda value: isinstance(value, dict) and all(fits(item, inner[1]) for item in value.values())
    if is_dataclass(kind):
        return lambda value: isinstance(value, dict) and not problem_of(_shape(kind), value)  # type: ignore[arg-type]
    return lambda value: isinstance(value, kind)


def _any_of(kinds: Iterable[Any]) -> Callable[[Any], bool]:
    tests = [_test(kind) for kind in kinds]

    def fits_one(value: Any) -> bool:
        for test in tests:  # noqa: SIM110  # any() takes three times as long
            if test(value):
                return True
        return False

    return fits_one


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
    """Return the fields without a default, which the object must have."""
    hints = _hints(kind)
    required = (field.name for field in fields(kind) if field.default is field.default_factory is MISSING)
    return {name: hints[name] for name in required}
