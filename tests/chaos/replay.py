"""Compute the content of a disk after a power cut from the records of faults.c.

POSIX permits all of these results. `STRICT`: a new name exists only once its folder was flushed. In the others, all
names survive (as on ext4, and on many network file systems), but of contents only the flushed part; or half of the
rest, too; or zeros in place of the rest, if the size of a file was on disk before its content.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

_HEADER = struct.Struct("<8sqqiiq")


class Survives(Enum):
    STRICT = "what was flushed"
    NAMES_FIRST = "names, and contents that were flushed"
    TORN = "names, and contents by half"
    ZEROS = "names and sizes, and contents that were flushed"


@dataclass(frozen=True)
class Change:
    kind: str
    number: int
    """The number that faults.c counts; a failed change has a number, but no record."""
    path: str
    second: str
    offset: int
    data: bytes


@dataclass
class File:
    content: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass
class Link:
    to: str


@dataclass
class Folder:
    names: dict[str, File | Link | Folder] = field(default_factory=dict)
    flushed: dict[str, File | Link | Folder] = field(default_factory=dict)


def changes(records: Path) -> Iterator[Change]:
    content, at = records.read_bytes(), 0
    while at < len(content):
        kind, number, offset, path, second, size = _HEADER.unpack_from(content, at)
        parts, at = [], at + _HEADER.size
        for length in (path, second, size):
            parts.append(content[at : at + length])
            at += length
        yield Change(kind.rstrip(b"\0").decode(), number, parts[0].decode(), parts[1].decode(), offset, parts[2])


class Disk:
    def __init__(self, root: Path) -> None:
        """Read the current content of `root`, and count all of it as flushed."""
        self._root = root
        self._top = _read(root)

    def apply(self, change: Change) -> None:
        if change.path.endswith(" (deleted)"):
            return
        if change.kind == "flush":
            self._flush(change.path)
            return
        parent, name = self._place(change.second or change.path)
        match change.kind:
            case "create":
                parent.names[name] = File()
            case "mkdir":
                parent.names[name] = Folder()
            case "symlink":
                parent.names[name] = Link(change.path)
            case "unlink" | "rmdir":
                del parent.names[name]
            case "rename":
                source, former = self._place(change.path)
                parent.names[name] = source.names.pop(former)
            case "link":
                source, former = self._place(change.path)
                parent.names[name] = source.names[former]
            case "write":
                self._file(change.path).content[change.offset : change.offset + len(change.data)] = change.data
            case "mode" | "time" | "room":
                pass  # no promise depends on these
            case "cut":
                del self._file(change.path).content[change.offset :]
            case other:
                raise AssertionError(f"unknown change {other!r}")

    def write(self, target: Path, survives: Survives) -> None:
        """Create `target` with the content that remains after a power cut."""
        _write(self._top, target, survives)

    def _flush(self, path: str) -> None:
        found = self._top if Path(path) == self._root else None
        if found is None:
            parent, name = self._place(path)
            found = parent.names[name]  # type: ignore[assignment]
        if isinstance(found, Folder):
            found.flushed = dict(found.names)
        else:
            assert isinstance(found, File)
            found.flushed = bytes(found.content)

    def _place(self, path: str) -> tuple[Folder, str]:
        *parts, name = Path(path).relative_to(self._root).parts
        at = self._top
        for part in parts:
            below = at.names[part]
            assert isinstance(below, Folder), path
            at = below
        return at, name

    def _file(self, path: str) -> File:
        parent, name = self._place(path)
        found = parent.names[name]
        assert isinstance(found, File), path
        return found


def _read(path: Path) -> Folder:
    found = Folder()
    for each in path.iterdir():
        if each.is_symlink():
            found.names[each.name] = Link(str(each.readlink()))
        elif each.is_dir():
            found.names[each.name] = _read(each)
        else:
            content = each.read_bytes()
            found.names[each.name] = File(bytearray(content), content)
    found.flushed = dict(found.names)
    return found


def _write(folder: Folder, target: Path, survives: Survives) -> None:
    target.mkdir(mode=0o700)
    for name, each in (folder.flushed if survives is Survives.STRICT else folder.names).items():
        if isinstance(each, Folder):
            _write(each, target / name, survives)
        elif isinstance(each, Link):
            (target / name).symlink_to(each.to)
        else:
            (target / name).write_bytes(_content(each, survives))
            (target / name).chmod(0o600)


def _content(file: File, survives: Survives) -> bytes:
    match survives:
        case Survives.TORN:
            half = len(file.content) // 2
            return bytes(file.content[:half]) + file.flushed[half:]
        case Survives.ZEROS:
            return file.flushed.ljust(len(file.content), b"\0")
    return file.flushed
