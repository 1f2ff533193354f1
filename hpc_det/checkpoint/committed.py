"""Checkpoints on disk: a folder each, committed by one rename, with a manifest of every file's size and checksum.

    checkpoints/UUID/manifest.json   {"uuid", "steps_completed", "time", "files": {name: {"size", "crc32"}}, "crc32"}
                                     and {"removed": [names]} if its owner has deleted some of its files
                                     and {"nodes": {folder: bytes in it}} of a gang of several nodes

The files in the folders of nodes are in the manifests of these (`node_folders`), which are among the "files".

The last crc32 is the manifest's own: a damaged "steps_completed" must not make an old checkpoint the newest one.
A folder whose manifest is missing, torn or has another structure is not a checkpoint, and is never resumed from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_det.checkpoint.committed_folder import FolderFormat, OddManifest, delete, in_words, irregularities
from hpc_det.checkpoint.node_folders import is_node_folder
from hpc_det.checkpoint.reading import entry_of, open_regular
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.errors import count
from hpc_det.node import disk
from hpc_det.node.files import make_folders, set_mode

MANIFEST = "manifest.json"
FORMAT = FolderFormat(MANIFEST, CRC)
CODE, LOAD_DATA = "code", "load_data.json"
"""The folder of the trial's code in a checkpoint, and the file that exists if a checkpoint contains code."""
METADATA = "metadata.json"
"""The file with versions and the number of batches trained."""
_MOST = 1 << 62
"""Exclusive upper limit for a number of batches, and for the bytes of a file."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A committed checkpoint: its folder has its final name."""

    path: Path
    steps: int
    """Batches trained."""
    time: float
    """Time of the commit, in seconds since the epoch."""
    files: dict[str, FileEntry]
    """The entries of its manifest; `whole` also has those of the manifests of nodes."""
    nodes: dict[str, int] = field(default_factory=dict)
    """The bytes in the folder of each node, without its manifest, by name."""
    removed: tuple[str, ...] = ()
    """Names of files that its owner has deleted. If there are any, no trial resumes from the checkpoint."""

    unread: tuple[str, ...] = ()
    """Names of the manifests of nodes that are missing or do not match their checksums, of a `whole` checkpoint."""

    @property
    def uuid(self) -> str:
        return self.path.name

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values()) + sum(self.nodes.values())

    @cached_property
    def whole(self) -> Committed:
        """This checkpoint with the entries of all its files, also of those in the folders of nodes.

        The manifests of the nodes are read for it. The files of one that is `unread` have no entries.
        """
        return self.expanded(lambda name: _content_of(self.path / name)) if self.nodes else self

    def expanded(self, content: Callable[[str], bytes | None]) -> Committed:
        """Return `whole`, given the content of each file; None: it cannot be read."""
        files, unread = dict(self.files), []
        for name in map(manifest_of, self.nodes):
            text = content(name)
            if text is not None and CRC.of(text) == self.files.get(name):
                files |= entries_in(text)
            else:
                unread.append(name)
        return replace(self, files=files, nodes={}, unread=tuple(unread))

    def is_code(self, name: str) -> bool:
        """Return whether a file belongs to the trial's code. Damaged code does not prevent a resume."""
        return PurePosixPath(name).parts[:1] == (CODE,) and LOAD_DATA in self.files

    @property
    def state(self) -> dict[str, FileEntry]:
        """Entries of all files but the code; a trial resumes only if all of them are undamaged."""
        return {name: entry for name, entry in self.whole.files.items() if not self.is_code(name)}

    @property
    def code(self) -> dict[str, FileEntry]:
        return {name: entry for name, entry in self.files.items() if self.is_code(name)}

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of its manifest, without the seal."""
        return {
            "uuid": self.uuid,
            "steps_completed": self.steps,
            "time": self.time,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            **({"nodes": dict(sorted(self.nodes.items()))} if self.nodes else {}),
            **({"removed": sorted(self.removed)} if self.removed else {}),
        }

    def damage(self, *, folder: Path | None = None) -> list[str]:
        """Return a sentence for each problem of its state; reads every byte (crc32 is faster than a disk).

        `folder`: the files are there instead of at `path`, for instance before a rename.
        """
        return self._damage(folder or self.path, self.state, is_code=False)

    def code_damage(self) -> list[str]:
        """Return a sentence for each problem of its code; reads every byte."""
        return self._damage(self.path, self.code, is_code=True)

    def irregularities(self, folder: Path, *, is_code: bool) -> dict[str, str]:
        """Return the problems of the entries in its folder, by name, without opening a file.

        `is_code`: True for the entries of the code, False for all others.
        """
        sizes = {name: entry.size for name, entry in self.whole.files.items()}
        found = irregularities(folder, sizes, {MANIFEST, *self.removed})
        for name in self.whole.unread:  # instead of each file that the manifest names
            node = PurePosixPath(name).parent
            found = {each: problem for each, problem in found.items() if PurePosixPath(each).parent != node}
            found[name] = CRC.misfit if (folder / name).exists() else os.strerror(2)  # ENOENT
        return {name: problem for name, problem in found.items() if self.is_code(name) is is_code}

    def _damage(self, folder: Path, files: dict[str, FileEntry], *, is_code: bool) -> list[str]:
        wrong = self.irregularities(folder, is_code=is_code)
        rest = {name: entry for name, entry in files.items() if name not in wrong}
        return in_words(wrong | FORMAT.damage(folder, rest))


Damage = Callable[[Committed], list[str]]
"""Returns a sentence for each problem of the state of a checkpoint."""

SetAside = Callable[[Path, int | None, list[str]], str]
"""Called for a damaged checkpoint with its folder, its batches (None: unknown) and its problems. Returns text that is
appended to the message about it.
"""


def committed(checkpoints: Path) -> list[Committed]:
    """Return all committed checkpoints, newest first. Raises NewerFormat."""
    return newest_first(found for found in map(committed_at, folders(checkpoints)) if found)


def folders(checkpoints: Path) -> list[Path]:
    """Return the folders below `checkpoints` that are not hidden, whatever they contain."""
    try:
        names = [name for name in os.listdir(checkpoints) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    return [checkpoints / name for name in sorted(names) if os.path.isdir(checkpoints / name)]


def newest_first(checkpoints: Iterable[Committed]) -> list[Committed]:
    """Return `checkpoints` sorted by batches, most first; of those at the same batch, the one committed last first."""
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.steps, checkpoint.time), reverse=True)


def newest_steps(checkpoints: Path) -> int:
    """Return the number of batches in the newest checkpoint that a trial may resume from; 0 without one."""
    return max((checkpoint.steps for checkpoint in committed(checkpoints) if not checkpoint.removed), default=0)


def newest_good(
    checkpoints: Path, damage: Damage = Committed.damage, set_aside: SetAside = lambda *_: ""
) -> tuple[Committed | None, list[str]]:
    """Return the newest undamaged checkpoint, or None, and a sentence for each one that was skipped.

    Checkpoints are checked with `damage`, newest first, until one is undamaged. `set_aside` is called for each damaged
    one, and for each folder whose manifest cannot be read.
    """
    every: list[Committed] = []
    skipped: list[str] = []
    for folder in folders(checkpoints):
        try:
            every.append(read_manifest(folder))
        except FileNotFoundError:  # no manifest: not a checkpoint
            continue
        except (OddManifest, OSError) as error:
            problem = FORMAT.problem(error)
            kept = set_aside(folder, None, [problem])
            skipped.append(f"checkpoint {folder.name} is damaged: {problem}{kept}")
    for checkpoint in newest_first(every):
        if checkpoint.removed:
            skipped.append(
                f"checkpoint {checkpoint.uuid} at {count(checkpoint.steps, 'batch')} {lacks_files(checkpoint)}"
            )
            continue
        if not (found := damage(checkpoint)):
            return checkpoint, skipped
        kept, what = set_aside(checkpoint.path, checkpoint.steps, found), "; ".join(found)
        skipped.append(f"checkpoint {checkpoint.uuid} at {count(checkpoint.steps, 'batch')} is damaged: {what}{kept}")
    return None, skipped


def lacks_files(checkpoint: Committed) -> str:
    """Return text for a message: why a checkpoint with removed files is skipped."""
    return f"lacks files that `hpc-det checkpoint rm --glob` removed: {', '.join(checkpoint.removed)}"


def manifest_of(node: str) -> str:
    """Return the name of the manifest in the folder of a node."""
    return f"{node}/{MANIFEST}"


def node_manifest(entries: Mapping[str, FileEntry]) -> str:
    """Return the text of the manifest of a node."""
    return FORMAT.text({"files": {name: asdict(entry) for name, entry in sorted(entries.items())}})


def entries_in(text: bytes) -> dict[str, FileEntry]:
    """Return the entries in the manifest of a node; {} if it is not one."""
    try:
        files = {name: FileEntry(**entry) for name, entry in FORMAT.parsed(text, Path())["files"].items()}
    except (OddManifest, LookupError, TypeError, AttributeError):
        return {}
    return {} if [*_odd_entries(files)] else files


def _content_of(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            return file.read()
    except OSError:
        return None


def checksum(path: Path) -> FileEntry:
    """Return the manifest entry of a file as it is now. Raises OSError."""
    return entry_of(path, CRC)


def parsed(manifest: bytes, folder: Path) -> Committed:
    """Return the checkpoint with this manifest in `folder`. Raises OddManifest, NewerFormat.

    The folder may have another name than the uuid in the manifest, as a copy does.
    """
    return _from_manifest(FORMAT.parsed(manifest, folder), folder)


def _from_manifest(manifest: Mapping[str, Any], folder: Path) -> Committed:
    try:
        files = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
        removed = tuple(manifest.get("removed", ()))
        found = Committed(
            path=folder,
            steps=manifest["steps_completed"],
            time=manifest["time"],
            files=files,
            nodes=dict(manifest.get("nodes", {})),
            removed=removed,
        )
    except (LookupError, TypeError, AttributeError, ValueError):
        raise OddManifest("does not have the structure of a manifest") from None
    if problems := [*_odd_values(found)]:
        raise OddManifest("; ".join(problems))
    return found


def _odd_values(checkpoint: Committed) -> Iterator[str]:
    yield from _odd_entries(checkpoint.files)
    yield from _odd_counts({"steps_completed": (checkpoint.steps, _MOST)})
    yield from _odd_counts({f"bytes in {name!r}": (size, _MOST) for name, size in checkpoint.nodes.items()})
    yield from (f"{name!r} is no folder of a node" for name in checkpoint.nodes if not is_node_folder(name))
    if type(checkpoint.time) not in (int, float) or not math.isfinite(checkpoint.time):
        yield f"time is {checkpoint.time!r}"
    if not all(isinstance(name, str) for name in checkpoint.removed):
        yield "removed is not a list of names"
    else:
        yield from outside(checkpoint.removed)


def _odd_entries(files: Mapping[str, FileEntry]) -> Iterator[str]:
    for name, entry in files.items():
        yield from _odd_counts({f"size of {name!r}": (entry.size, _MOST), f"crc32 of {name!r}": (entry.crc32, 1 << 32)})
    yield from outside(files)


def _odd_counts(counts: Mapping[str, tuple[Any, int]]) -> Iterator[str]:
    for what, (value, end) in counts.items():
        if type(value) is not int or not 0 <= value < end:  # not isinstance: bool is a subclass of int
            yield f"{what} is {value!r}"


def copy_whole(checkpoint: Committed, get: Callable[[str, Path], object]) -> list[str]:
    """Copy all files with `get(name, target)` into a hidden folder, check them, and rename it to the checkpoint's path.

    A folder at that path, such as a damaged checkpoint, is replaced. Returns a sentence for each problem of the copied
    state; if there is any, nothing was renamed. The code is not checked, and may be incomplete.
    """
    partial = checkpoint.path.with_name(f".partial-{checkpoint.uuid}")
    disk.remove_tree(partial)
    try:
        for name in [*checkpoint.whole.files, MANIFEST]:
            target = partial / name
            make_folders(target.parent)
            try:
                get(name, target)
                set_mode(target)
            except FileNotFoundError as error:
                if not checkpoint.is_code(name):  # a trial can resume without the code
                    return [f"{name}: {error.strerror or 'missing'}"]
        if damage := checkpoint.whole.damage(folder=partial):
            return damage
        if checkpoint.path.exists():
            delete(checkpoint.path, hidden=".partial-damaged")
        disk.rename(partial, checkpoint.path)
        return []
    finally:
        disk.remove_tree(partial)


def outside(names: Iterable[str]) -> list[str]:
    """Return a sentence for each name that leads out of a checkpoint's folder.

    The names become paths on this machine, and other users may be able to write to the bucket that they come from.
    """
    return [f"{name!r} is not a path inside the checkpoint" for name in names if not _is_inside(name)]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    is_plain = str(path) == name and path.parts != () and "\0" not in name
    return is_plain and not path.is_absolute() and ".." not in path.parts


def read_manifest(folder: Path) -> Committed:
    """Return the checkpoint in `folder`.

    Raises OddManifest, NewerFormat, and OSError if its manifest is missing or unreadable.
    """
    return _from_manifest(FORMAT.read(folder), folder)


def committed_at(folder: Path) -> Committed | None:
    """Return the checkpoint in `folder`, or None if its manifest is missing or invalid. Raises NewerFormat."""
    try:
        return read_manifest(folder)
    except (OddManifest, OSError):
        return None
