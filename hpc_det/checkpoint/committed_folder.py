"""Folders that are committed by one rename, with a manifest that contains the seals of all files and its own.

Order, each step durable before the next: files, manifest, the partial folder, the rename, the parent folder. A kill at
any point leaves either the old state or the new one.

Such a folder may contain only folders and the regular files that its manifest names, and no other user may be able to
change them. Its files are loaded and imported, so a file that another user has put there must never be read. Therefore
the folder is inspected before any of its files is opened.
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
from hpc_det.node.format_version import with_format
from hpc_det.node.json_files import without_format

_LARGEST_MANIFEST = 1 << 26
"""Size limit in bytes; enough for half a million files."""


class OddManifest(Exception):
    """A manifest is damaged or invalid."""


@dataclass(frozen=True)
class FolderFormat(Generic[E]):
    """The manifest name and the seal of one kind of folder."""

    manifest: str
    """File name of the manifest."""
    seal: Seal[E]

    def commit(self, partial: Path, folder: Path, content: Mapping[str, Any]) -> None:
        """Write the manifest and rename `partial` to `folder` beside it. Its files must already be flushed to disk.

        `content`: the content of the manifest, without the seal.
        """
        write_flushed(partial / self.manifest, self.text(content))
        flush_folder(partial)  # the names of the files are durable before the rename
        disk.rename(partial, folder)
        flush_folder(folder.parent)  # the rename is durable

    def text(self, content: Mapping[str, Any]) -> str:
        """Return the text of a manifest with this content, the format version of the folder, and the seal."""
        return json.dumps(self.seal.sealed(with_format(content, self.manifest)), indent=1)

    def read(self, folder: Path) -> dict[str, Any]:
        """Return the content of the manifest in `folder`.

        Raises OddManifest, NewerFormat, and OSError if it cannot be read.
        """
        text = tried_twice(lambda: self._text_in(folder))
        if len(text) > _LARGEST_MANIFEST:
            raise OddManifest(f"more than {_LARGEST_MANIFEST} bytes")
        return self.parsed(text, folder)

    def _text_in(self, folder: Path) -> bytes:
        with open_regular(folder / self.manifest) as file:
            return file.read(_LARGEST_MANIFEST + 1)

    def parsed(self, text: bytes, folder: Path) -> dict[str, Any]:
        """Return the content of a manifest without its seal and its format version.

        Raises OddManifest, and NewerFormat for a manifest whose seal fits. `folder`: for the message.
        """
        try:
            manifest = json.loads(text)
            is_whole = isinstance(manifest, dict) and self.seal.fits(manifest)
        except (ValueError, RecursionError):  # RecursionError: deeply nested JSON
            raise OddManifest("does not have the structure of a manifest") from None
        if not is_whole:
            raise OddManifest(self.seal.misfit)
        del manifest[self.seal.manifest_key]
        return without_format(manifest, folder / self.manifest)

    def problem(self, error: OddManifest | OSError) -> str:
        """Return a sentence that describes the error of a manifest."""
        return f"{self.manifest}: {getattr(error, 'strerror', None) or error}"

    def damage(self, folder: Path, files: Mapping[str, E]) -> dict[str, str]:
        """Return the problems of `files` in `folder`, by name; reads every byte."""
        blocks = blocks_of(files, self.seal)
        found = read_blocks(folder, files, blocks, self.seal)
        return differences(files, zip(blocks, found, strict=True), self.seal)


def delete(folder: Path, hidden: str) -> None:
    """Delete `folder`, if it exists. It is renamed to `hidden` first: a half-deleted folder must never be loaded."""
    aside = folder.with_name(hidden)
    disk.remove_tree(aside)  # left by a process that was killed during a deletion
    with suppress(FileNotFoundError):
        disk.rename(folder, aside)
    disk.remove_tree(aside)


def irregularities(folder: Path, sizes: Mapping[str, int] | None = None, known: Collection[str] = ()) -> dict[str, str]:
    """Return the problems of the entries in `folder`, by name, without opening a file; "." is `folder` itself.

    `sizes`: size in bytes of each file in the manifest; None: without a manifest, any regular file is allowed.
    `known`: names of further files that are allowed.

    Trusted owners are this user, root and, in a folder that is shared with a group, the owner of the parent folder.
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
        # Hidden files are never loaded or imported. NFS renames a deleted file that is still open to a hidden name
        # (.nfsXXXX), and killed writers leave hidden files behind.
        if not Path(name).name.startswith("."):
            wrong.setdefault(name, "not in the manifest")
    for name, size in sizes.items():
        if name not in files:
            wrong.setdefault(name, os.strerror(2))  # ENOENT
        elif files[name] != size:
            wrong.setdefault(name, f"{files[name]} bytes, the manifest says {size}")
    return wrong


def _look_into(folder: Path) -> tuple[dict[str, str], dict[str, int] | None]:
    """Return the problems by name, and the sizes of all files; None for the sizes if `folder` is not a folder."""
    top = os.lstat(folder)
    if not stat.S_ISDIR(top.st_mode):
        return {".": f"{kind_of(top.st_mode)}, not a folder"}, None
    wrong = dict(_wrong_entries(folder, _trusted(folder), is_open=bool(top.st_mode & 0o077)))
    return wrong, dict(_files(folder))


def in_words(wrong: Mapping[str, str]) -> list[str]:
    """Return a sentence for each problem, sorted by the name of the entry."""
    return [problem if name == "." else f"{name}: {problem}" for name, problem in sorted(wrong.items())]


def _trusted(folder: Path) -> set[int]:
    return {os.geteuid(), 0, *([os.stat(folder.parent).st_uid] if is_shared(folder) else [])}


def _wrong_entries(folder: Path, trusted: Collection[int], *, is_open: bool) -> Iterator[tuple[str, str]]:
    """Yield the names of entries that must not be read, with the reason.

    `is_open`: the group or all users can enter the folder; otherwise the modes of its entries have no effect.
    """
    for name, found in [(".", os.lstat(folder)), *_entries(folder)]:
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            yield name, f"{kind_of(found.st_mode)}, which a checkpoint must not contain"
        elif found.st_uid not in trusted:
            yield name, f"owned by {_user(found.st_uid)}, not by {_user(os.geteuid())}"
        elif is_open and others_may_write(found):
            mode = stat.S_IMODE(found.st_mode)
            yield name, f"mode {mode:04o} lets others change it; if you trust it, run `chmod -R go-w {folder}`"


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and size in bytes of each entry that is not a folder."""
    return ((name, found.st_size) for name, found in _entries(folder) if not stat.S_ISDIR(found.st_mode))


def _entries(folder: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Yield all entries in `folder` at any depth, by relative path; links are not followed."""
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
