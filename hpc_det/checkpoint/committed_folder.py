"""Folders that are committed by one rename, with a manifest that seals itself and every file.

Order, each step durable before the next: files, manifest, the partial folder, the rename, the parent folder. A kill at
any point leaves either the old state or the new one.

Such a folder contains regular files that the manifest names, in folders, which nobody else can change. Its files are
loaded and imported, so what somebody else has put there must not be read. It is looked into before anything is opened.
"""

from __future__ import annotations

import json
import os
import pwd
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from hpc_det.checkpoint.reading import blocks_of, differences, kind_of, open_regular, read_blocks, tried_twice
from hpc_det.checkpoint.seals import E, Seal
from hpc_det.node import disk
from hpc_det.node.files import flush_folder, is_shared, others_may_write, write_flushed

_LARGEST_MANIFEST = 1 << 26
"""Bytes: of half a million files."""


class OddManifest(Exception):
    """What is wrong with a manifest."""


@dataclass(frozen=True)
class FolderFormat(Generic[E]):
    """How folders of one kind are sealed."""

    manifest: str
    """The name of the file."""
    seal: Seal[E]

    def commit(self, partial: Path, folder: Path, content: Mapping[str, Any]) -> None:
        """Make `folder` of the partial one beside it, whose files are on disk. `content`: of its manifest."""
        write_flushed(partial / self.manifest, self.text(content))
        flush_folder(partial)
        disk.rename(partial, folder)
        flush_folder(folder.parent)

    def text(self, content: Mapping[str, Any]) -> str:
        """The manifest with this content, as it is written."""
        return json.dumps(self.seal.sealed(content), indent=1)

    def read(self, folder: Path) -> dict[str, Any]:
        """The content of the manifest in `folder`. Raises OddManifest, and OSError where it cannot be read."""
        text = tried_twice(lambda: self._text_in(folder))
        if len(text) > _LARGEST_MANIFEST:
            raise OddManifest(f"more than {_LARGEST_MANIFEST} bytes")
        return self.parsed(text)

    def _text_in(self, folder: Path) -> bytes:
        with open_regular(folder / self.manifest) as file:
            return file.read(_LARGEST_MANIFEST + 1)

    def parsed(self, text: bytes) -> dict[str, Any]:
        """The content of a manifest. Raises OddManifest."""
        try:
            manifest = json.loads(text)
            is_whole = isinstance(manifest, dict) and self.seal.fits(manifest)
        except (ValueError, RecursionError):
            raise OddManifest("not of the shape that a manifest has") from None
        if not is_whole:
            raise OddManifest(self.seal.misfit)
        del manifest[self.seal.manifest_key]
        found: dict[str, Any] = manifest
        return found

    def problem(self, error: OddManifest | OSError) -> str:
        """What is wrong with a manifest, in words."""
        return f"{self.manifest}: {getattr(error, 'strerror', None) or error}"

    def damage(self, folder: Path, files: Mapping[str, E]) -> dict[str, str]:
        """What is wrong with `files` in `folder`, by name; reads every byte."""
        blocks = blocks_of(files, self.seal)
        found = read_blocks(folder, files, blocks, self.seal)
        return differences(files, zip(blocks, found, strict=True), self.seal)


def delete(folder: Path, hidden: str) -> None:
    """Renamed to `hidden` beside it first: a half-deleted folder is no checkpoint. What is gone already is no error."""
    aside = folder.with_name(hidden)
    disk.remove_tree(aside)
    with suppress(FileNotFoundError):
        disk.rename(folder, aside)
    disk.remove_tree(aside)


def irregularities(folder: Path, sizes: Mapping[str, int] | None = None, known: Collection[str] = ()) -> dict[str, str]:
    """What is wrong, by the name of the entry; "." is `folder` itself.

    `sizes`: of the files that the manifest names; None: there is no manifest, and any regular file may be there.
    `known`: files that may be there besides. So may hidden ones, which nothing loads or imports: NFS calls a file so
    that was removed while it was open, and a killed writer leaves them.

    An owner is trusted who is this user, root or, of a folder that is shared with a group, the owner of the folder
    above.
    """
    try:
        wrong, files = tried_twice(lambda: _look_into(folder))
    except OSError as error:
        return {".": str(error.strerror)}
    if files is None:
        return wrong
    if sizes is None:
        return wrong
    for name in files.keys() - sizes.keys() - {*known}:
        if not Path(name).name.startswith("."):
            wrong.setdefault(name, "not in the manifest")
    for name, size in sizes.items():
        if name not in files:
            wrong.setdefault(name, os.strerror(2))
        elif files[name] != size:
            wrong.setdefault(name, f"{files[name]} bytes, the manifest says {size}")
    return wrong


def _look_into(folder: Path) -> tuple[dict[str, str], dict[str, int] | None]:
    """What is wrong, and the sizes of all files; None for them where it is no folder."""
    top = os.lstat(folder)
    if not stat.S_ISDIR(top.st_mode):
        return {".": f"{kind_of(top.st_mode)}, and no folder"}, None
    wrong = dict(_wrong_entries(folder, _trusted(folder), is_open=bool(top.st_mode & 0o077)))
    return wrong, dict(_files(folder))


def in_words(wrong: Mapping[str, str]) -> list[str]:
    """A sentence each."""
    return [problem if name == "." else f"{name}: {problem}" for name, problem in sorted(wrong.items())]


def _trusted(folder: Path) -> set[int]:
    return {os.geteuid(), 0, *([os.stat(folder.parent).st_uid] if is_shared(folder) else [])}


def _wrong_entries(folder: Path, trusted: Collection[int], *, is_open: bool) -> Iterator[tuple[str, str]]:
    """`is_open`: others may enter the folder, so that the modes of what is in it count."""
    for name, found in [(".", os.lstat(folder)), *_entries(folder)]:
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            yield name, f"{kind_of(found.st_mode)}, and no file of a checkpoint"
        elif found.st_uid not in trusted:
            yield name, f"owned by {_user(found.st_uid)}, not by {_user(os.geteuid())}"
        elif is_open and others_may_write(found):
            mode = stat.S_IMODE(found.st_mode)
            yield name, f"mode {mode:04o} lets others change it; once you trust it, `chmod -R go-w {folder}`"


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of all that is no folder."""
    return ((name, found.st_size) for name, found in _entries(folder) if not stat.S_ISDIR(found.st_mode))


def _entries(folder: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """All in `folder`, at any depth; no link is followed."""
    with os.scandir(folder / below) as found:
        entries = [(f"{below}{entry.name}", entry.stat(follow_symlinks=False)) for entry in found]
    for name, status in entries:
        yield name, status
        if stat.S_ISDIR(status.st_mode):
            yield from _entries(folder, f"{name}/")


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
