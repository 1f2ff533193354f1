"""Checkpoints on disk: a folder each, committed by one rename, with a manifest of every file's size and checksum.

    checkpoints/UUID/manifest.json   {"uuid", "steps_completed", "time", "files": {name: {"size", "crc32"}}, "crc32"}
                                     and {"removed": [names]}, where its owner has removed some of its files

The last checksum is the manifest's own, so that a damaged number of batches does not pass for a newer checkpoint.
Anything without that exact shape is not a checkpoint: a torn one is never chosen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_det.checkpoint.committed_folder import FolderFormat, OddManifest, delete, in_words, irregularities
from hpc_det.checkpoint.reading import entry_of
from hpc_det.checkpoint.seals import CRC, FileEntry
from hpc_det.node import disk
from hpc_det.node.files import make_folders, set_mode

MANIFEST = "manifest.json"
FORMAT = FolderFormat(MANIFEST, CRC)
CODE, LOAD_DATA = "code", "load_data.json"
"""The folder of the trial's code in a checkpoint, and the file that says whether a checkpoint has one."""
_MOST = 1 << 62
"""Batches, or bytes of a file."""


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A checkpoint whose rename has happened."""

    path: Path
    steps: int
    """Batches trained."""
    time: float
    files: dict[str, FileEntry]
    removed: tuple[str, ...] = ()
    """What its owner has removed of it: nobody goes on from such a checkpoint."""

    @property
    def uuid(self) -> str:
        return self.path.name

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def is_code(self, name: str) -> bool:
        """Whether it belongs to the code, which no training resumes from: it never decides about a resume."""
        return PurePosixPath(name).parts[:1] == (CODE,) and LOAD_DATA in self.files

    @property
    def state(self) -> dict[str, FileEntry]:
        """The files that decide about a resume."""
        return {name: entry for name, entry in self.files.items() if not self.is_code(name)}

    @property
    def code(self) -> dict[str, FileEntry]:
        return {name: entry for name, entry in self.files.items() if self.is_code(name)}

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of its manifest."""
        return {
            "uuid": self.uuid,
            "steps_completed": self.steps,
            "time": self.time,
            "files": {name: asdict(entry) for name, entry in sorted(self.files.items())},
            **({"removed": sorted(self.removed)} if self.removed else {}),
        }

    def damage(self, *, folder: Path | None = None) -> list[str]:
        """What is wrong with its state, a sentence each; reads every byte (crc32 is free next to a disk).

        `folder`: where the files are until they are at its path.
        """
        return self._damage(folder or self.path, self.state, is_code=False)

    def code_damage(self) -> list[str]:
        """What is wrong with its code, a sentence each."""
        return self._damage(self.path, self.code, is_code=True)

    def irregularities(self, folder: Path, *, is_code: bool) -> dict[str, str]:
        """What is wrong with the entries of its folder before any is opened, by name: of its code, or of all else."""
        found = irregularities(
            folder, {name: entry.size for name, entry in self.files.items()}, {MANIFEST, *self.removed}
        )
        return {name: problem for name, problem in found.items() if self.is_code(name) is is_code}

    def _damage(self, folder: Path, files: dict[str, FileEntry], *, is_code: bool) -> list[str]:
        wrong = self.irregularities(folder, is_code=is_code)
        rest = {name: entry for name, entry in files.items() if name not in wrong}
        return in_words(wrong | FORMAT.damage(folder, rest))


Damage = Callable[[Committed], list[str]]

SetAside = Callable[[Path, int | None, list[str]], str]
"""Called for a checkpoint that is not whole: its folder, its batches if they are known, and what is wrong with it.
Returns what a message adds about it.
"""


def committed(checkpoints: Path) -> list[Committed]:
    """All committed checkpoints, the newest first."""
    return newest_first(found for found in map(committed_at, folders(checkpoints)) if found)


def folders(checkpoints: Path) -> list[Path]:
    """Those of checkpoints, by their names, whatever is in them."""
    try:
        names = [name for name in os.listdir(checkpoints) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    return [checkpoints / name for name in sorted(names) if os.path.isdir(checkpoints / name)]


def newest_first(checkpoints: Iterable[Committed]) -> list[Committed]:
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.steps, checkpoint.time), reverse=True)


def newest_steps(checkpoints: Path) -> int:
    """Batches in the newest checkpoint that a trial may resume from; 0 with none."""
    return max((checkpoint.steps for checkpoint in committed(checkpoints) if not checkpoint.removed), default=0)


def newest_good(
    checkpoints: Path, damage: Damage = Committed.damage, set_aside: SetAside = lambda *_: ""
) -> tuple[Committed | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with each newer one that was skipped.

    `set_aside` is called for each that is not whole.
    """
    every: list[Committed] = []
    skipped: list[str] = []
    for folder in folders(checkpoints):
        try:
            every.append(read_manifest(folder))
        except FileNotFoundError:
            continue
        except (OddManifest, OSError) as error:  # its manifest is there and says nothing
            problem = FORMAT.problem(error)
            kept = set_aside(folder, None, [problem])
            skipped.append(f"checkpoint {folder.name} is damaged: {problem}{kept}")
    for checkpoint in newest_first(every):
        if checkpoint.removed:
            skipped.append(f"checkpoint {checkpoint.uuid} at {checkpoint.steps} batches {lacks_files(checkpoint)}")
            continue
        if not (found := damage(checkpoint)):
            return checkpoint, skipped
        kept, what = set_aside(checkpoint.path, checkpoint.steps, found), "; ".join(found)
        skipped.append(f"checkpoint {checkpoint.uuid} at {checkpoint.steps} batches is damaged: {what}{kept}")
    return None, skipped


def lacks_files(checkpoint: Committed) -> str:
    return f"lacks files that `hpc-det checkpoint rm --glob` removed: {', '.join(checkpoint.removed)}"


def checksum(path: Path) -> FileEntry:
    """What a manifest says about the file as it is now. Raises OSError."""
    return entry_of(path, CRC)


def parsed(manifest: bytes, folder: Path) -> Committed:
    """The checkpoint in `folder`, which may be a copy under another name. Raises OddManifest."""
    return _from_manifest(FORMAT.parsed(manifest), folder)


def _from_manifest(manifest: Mapping[str, Any], folder: Path) -> Committed:
    try:
        files = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
        removed = tuple(manifest.get("removed", ()))
        found = Committed(
            path=folder, steps=manifest["steps_completed"], time=manifest["time"], files=files, removed=removed
        )
    except (LookupError, TypeError, AttributeError):
        raise OddManifest("not of the shape that a manifest has") from None
    if problems := [*_odd_values(found)]:
        raise OddManifest("; ".join(problems))
    return found


def _odd_values(checkpoint: Committed) -> Iterator[str]:
    counts = {"steps_completed": (checkpoint.steps, _MOST)}
    for name, entry in checkpoint.files.items():
        counts |= {f"size of {name!r}": (entry.size, _MOST), f"crc32 of {name!r}": (entry.crc32, 1 << 32)}
    for what, (value, end) in counts.items():
        if type(value) is not int or not 0 <= value < end:
            yield f"{what} is {value!r}"
    if type(checkpoint.time) not in (int, float) or not math.isfinite(checkpoint.time):
        yield f"time is {checkpoint.time!r}"
    if not all(isinstance(name, str) for name in checkpoint.removed):
        yield "removed is no list of names"
    else:
        yield from outside([*checkpoint.files, *checkpoint.removed])


def copy_whole(checkpoint: Committed, get: Callable[[str, Path], object]) -> list[str]:
    """By `get(name, target)`, file by file, into a hidden folder, and by one rename to its path, where it may replace a
    damaged one.

    Returns what is damaged of its state; then there is nothing new at its path. Its code may be damaged.
    """
    partial = checkpoint.path.with_name(f".partial-{checkpoint.uuid}")
    disk.remove_tree(partial)
    try:
        for name in [*checkpoint.files, MANIFEST]:
            target = partial / name
            make_folders(target.parent)
            try:
                get(name, target)
                set_mode(target)
            except FileNotFoundError as error:
                if not checkpoint.is_code(name):
                    return [f"{name}: {error.strerror or 'missing'}"]
        if damage := checkpoint.damage(folder=partial):
            return damage
        if checkpoint.path.exists():
            delete(checkpoint.path, hidden=".partial-damaged")
        disk.rename(partial, checkpoint.path)
        return []
    finally:
        disk.remove_tree(partial)


def outside(names: Iterable[str]) -> list[str]:
    """A sentence for each that leads out of a checkpoint's folder: a bucket may be writable for others, and its names
    become paths here.
    """
    return [f"{name!r} is no file of a checkpoint" for name in names if not _is_inside(name)]


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    is_plain = str(path) == name and path.parts != () and "\0" not in name
    return is_plain and not path.is_absolute() and ".." not in path.parts


def read_manifest(folder: Path) -> Committed:
    """The checkpoint in `folder`. Raises OddManifest, and OSError where there is no manifest or it cannot be read."""
    return _from_manifest(FORMAT.read(folder), folder)


def committed_at(folder: Path) -> Committed | None:
    """None where its manifest is missing or torn."""
    try:
        return read_manifest(folder)
    except (OddManifest, OSError):
        return None
