"""Checkpoints on disk: a folder each, committed by one rename, with a manifest of every file's size and checksum.

    checkpoints/UUID/manifest.json   {"uuid", "steps_completed", "time", "files": {name: {"size", "crc32"}}, "crc32"}
                                     and {"removed": [names]}, where its owner has removed some of its files

The last checksum is the manifest's own, so that a damaged number of batches does not pass for a newer checkpoint.
Anything without that exact shape is not a checkpoint: a torn one is never chosen.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_det.checkpoint.reading import blocks_of, differences, read_blocks
from hpc_det.store.modes import make_folders

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    size: int
    crc32: int


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

    def damage(self, *, folder: Path | None = None) -> list[str]:
        """What differs from the manifest, a sentence each; reads every byte (crc32 is free next to a disk).

        `folder`: where the files are until they are at its path.
        """
        blocks = blocks_of(self.files)
        return differences(self.files, zip(blocks, read_blocks(folder or self.path, self.files, blocks), strict=True))


Damage = Callable[[Committed], list[str]]


def committed(checkpoints: Path) -> list[Committed]:
    """All committed checkpoints, the newest first."""
    try:
        folders = [entry for entry in checkpoints.iterdir() if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
    return newest_first(checkpoint for checkpoint in map(committed_at, folders) if checkpoint)


def newest_first(checkpoints: Iterable[Committed]) -> list[Committed]:
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.steps, checkpoint.time), reverse=True)


def newest_steps(checkpoints: Path) -> int:
    """Batches in the newest committed checkpoint; 0 with none."""
    return max((checkpoint.steps for checkpoint in committed(checkpoints)), default=0)


def newest_good(checkpoints: Path, damage: Damage = Committed.damage) -> tuple[Committed | None, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with each newer one that was skipped."""
    skipped: list[str] = []
    for checkpoint in committed(checkpoints):
        if checkpoint.removed:
            skipped.append(f"checkpoint {checkpoint.uuid} at {checkpoint.steps} batches {lacks_files(checkpoint)}")
            continue
        if not (found := damage(checkpoint)):
            return checkpoint, skipped
        skipped.append(f"checkpoint {checkpoint.uuid} at {checkpoint.steps} batches is damaged: {'; '.join(found)}")
    return None, skipped


def lacks_files(checkpoint: Committed) -> str:
    return f"lacks files that `hpc-det checkpoint rm --glob` removed: {', '.join(checkpoint.removed)}"


def checksum(path: Path) -> FileEntry:
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return FileEntry(size=size, crc32=crc)


def sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """`manifest` with its own checksum."""
    content = {name: value for name, value in manifest.items() if name != "crc32"}
    return {**content, "crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}


def manifest_of(checkpoint: Committed) -> str:
    manifest = {
        "uuid": checkpoint.uuid,
        "steps_completed": checkpoint.steps,
        "time": checkpoint.time,
        "files": {name: asdict(entry) for name, entry in sorted(checkpoint.files.items())},
        **({"removed": sorted(checkpoint.removed)} if checkpoint.removed else {}),
    }
    return json.dumps(sealed(manifest), indent=1)


def parsed(manifest_text: bytes, folder: Path) -> Committed | None:
    """The checkpoint in `folder`, which may be a copy under another name; None where its manifest is torn."""
    try:
        manifest = json.loads(manifest_text)
    except ValueError:
        return None
    if not isinstance(manifest, dict) or manifest != sealed(manifest):
        return None
    files = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
    return Committed(
        path=folder,
        steps=manifest["steps_completed"],
        time=manifest["time"],
        files=files,
        removed=tuple(manifest.get("removed", ())),
    )


def delete(folder: Path, hidden: str) -> None:
    """Renamed to `hidden` beside it first: a half-deleted folder is no checkpoint. What is gone already is no error."""
    aside = folder.with_name(hidden)
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def copy_whole(checkpoint: Committed, get: Callable[[str, Path], object]) -> list[str]:
    """By `get(name, target)`, file by file, into a hidden folder, and by one rename to its path, where it may replace a
    damaged one.

    Returns what is damaged; then there is nothing new at its path.
    """
    if problems := outside(checkpoint.files):
        return problems
    partial = checkpoint.path.with_name(f".partial-{checkpoint.uuid}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for name in [*checkpoint.files, MANIFEST]:
            target = partial / name
            make_folders(target.parent)
            try:
                get(name, target)
            except FileNotFoundError:
                return [f"{name}: missing"]
        if damage := checkpoint.damage(folder=partial):
            return damage
        if checkpoint.path.exists():
            delete(checkpoint.path, hidden=".partial-damaged")
        os.rename(partial, checkpoint.path)
        return []
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def outside(names: Iterable[str]) -> list[str]:
    """A sentence for each that leads out of a checkpoint's folder: a bucket may be writable for others, and its names
    become paths here.
    """
    paths = ((name, PurePosixPath(name)) for name in names)
    return [f"{name!r} is no file of a checkpoint" for name, path in paths if path.is_absolute() or ".." in path.parts]


def committed_at(folder: Path) -> Committed | None:
    """None where its manifest is missing or torn."""
    try:
        return parsed((folder / MANIFEST).read_bytes(), folder)
    except OSError:
        return None
