"""Durable snapshots: committed folders whose files and manifest are sealed with the key of the run.

    snapshots/12/state.pt        what all ranks share; copied by a node agent out of its memory
                 own             what each rank keeps for itself, one after the other
                 snapshot.json   {"number", "epochs_done", "calls", "round", "size",
                                  "own": [BYTES OF RANK 0, ...], "files": {NAME: [SIZE, MAC]}, "mac"}

Nothing of a snapshot may be unpickled before `newest` has given it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_det.checkpoint.committed_folder import FolderFormat, OddManifest, delete, in_words
from hpc_det.checkpoint.sealed_files import GoOn, write_sealed
from hpc_det.checkpoint.seals import HmacEntry, HmacSeal
from hpc_det.node import disk
from hpc_det.store.run_folder import RunFolder

KEPT = 2
ABANDONED_S = 3.0
_STATE, _OWN, _MANIFEST = "state.pt", "own", "snapshot.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Durable:
    """A snapshot whose rename has happened."""

    path: Path
    number: int
    epochs_done: int
    calls: int
    """train() calls that are in it."""
    round: Mapping[str, Any]
    """The record of the round that was open, opaque here; empty without one."""
    size: int
    """Ranks that it was taken of."""
    own: list[bytes] = field(repr=False)
    """Of each of them."""

    @property
    def state(self) -> Path:
        return self.path / _STATE


@dataclass(frozen=True)
class Partial:
    """A snapshot that is being written."""

    run: RunFolder
    number: int

    @property
    def path(self) -> Path:
        return self.run.snapshots / f".{self.number}.partial"

    def write(self, content: memoryview, go_on: GoOn = lambda: None) -> HmacEntry:
        """What all ranks share; see `write_sealed`."""
        return write_sealed(self.path / _STATE, content, HmacSeal(self.run.key()), go_on)

    def commit(
        self,
        state: HmacEntry,
        own: Sequence[bytes],
        *,
        epochs_done: int,
        calls: int,
        round: Mapping[str, Any] = MappingProxyType({}),
    ) -> Durable:
        """When the agent has written what all ranks share. Older ones go, but for the one before."""
        seal, final = HmacSeal(self.run.key()), self.run.snapshots / str(self.number)
        content = {
            "number": self.number,
            "epochs_done": epochs_done,
            "calls": calls,
            "round": dict(round),
            "size": len(own),
            "own": [len(part) for part in own],
            "files": {_STATE: state, _OWN: write_sealed(self.path / _OWN, memoryview(b"".join(own)), seal)},
        }
        FolderFormat(_MANIFEST, seal).commit(self.path, final, content)
        for number in _numbers(self.run)[KEPT:]:
            delete(self.run.snapshots / str(number), f".{number}.old")
        return Durable(
            path=final,
            number=self.number,
            epochs_done=epochs_done,
            calls=calls,
            round=round,
            size=len(own),
            own=[*own],
        )


def begin(run: RunFolder, number: int) -> Partial:
    """What agents that were killed left half-done is cleared away, but nothing newer: another agent may write that."""
    for leftover in run.snapshots.glob(".*"):
        if _number_of(leftover) <= number:
            disk.remove_tree(leftover)
    partial = Partial(run, number)
    disk.make_folder(partial.path, 0o700)
    return partial


def last_number(run: RunFolder) -> int:
    """Of any that was ever committed, usable or not; 0 before the first."""
    return max(_numbers(run), default=0)


def await_writers(run: RunFolder) -> None:
    """For a driver that takes over: agents of one that was killed still write down what they hold.

    A partial snapshot that has not grown for ABANDONED_S is nobody's any more.
    """
    sizes, still_since = _partial_sizes(run), time.monotonic()
    while sizes and time.monotonic() < still_since + ABANDONED_S:
        time.sleep(0.05)
        if (now := _partial_sizes(run)) != sizes:
            sizes, still_since = now, time.monotonic()


def _partial_sizes(run: RunFolder) -> dict[Path, int]:
    sizes = {}
    for path in run.snapshots.glob(".*.partial/*"):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes


class Damage(Exception):
    """What is wrong with a snapshot."""


def newest(run: RunFolder) -> Durable | None:
    """The newest snapshot that is whole and of this run: every byte is read. What is skipped is named in a warning."""
    folder_format = FolderFormat(_MANIFEST, HmacSeal(run.key()))
    for number in _numbers(run):
        try:
            return _checked(run.snapshots / str(number), folder_format)
        except (Damage, OSError) as problem:
            _log.warning("snapshot %s cannot be used, an older one is looked for: %s", number, problem)
    return None


def _checked(folder: Path, folder_format: FolderFormat[HmacEntry]) -> Durable:
    try:
        manifest = folder_format.read(folder)
    except (OddManifest, OSError) as error:
        raise Damage(f"{folder}: {folder_format.problem(error)}") from None
    if str(manifest["number"]) != folder.name:
        raise Damage(f"{folder}: {_MANIFEST}: of snapshot {manifest['number']}")
    files = {name: HmacEntry(*manifest["files"][name]) for name in (_STATE, _OWN)}
    if wrong := folder_format.damage(folder, files):
        raise Damage(f"{folder}: {'; '.join(in_words(wrong))}")
    own, seal = (folder / _OWN).read_bytes(), folder_format.seal
    if change := seal.difference(files[_OWN], seal.of(own)):  # since its blocks were read: ranks unpickle these bytes
        raise Damage(f"{folder}: {_OWN}: {change}")
    return Durable(
        path=folder,
        number=manifest["number"],
        epochs_done=manifest["epochs_done"],
        calls=manifest["calls"],
        round=manifest.get("round", {}),  # snapshots of earlier versions have none
        size=manifest["size"],
        own=split(own, manifest["own"]),
    )


def split(joined: bytes | bytearray, lengths: Sequence[int]) -> list[bytes]:
    """Each rank's own part, of all one after the other."""
    parts, offset = [], 0
    for length in lengths:
        parts.append(bytes(joined[offset : offset + length]))
        offset += length
    return parts


def _number_of(leftover: Path) -> int:
    """Of `.12.partial` and `.12.old`; 0 for what is none of them."""
    number = leftover.name.split(".")[1]
    return int(number) if number.isdecimal() else 0


def _numbers(run: RunFolder) -> list[int]:
    """Of all that were committed, the newest first."""
    with suppress(FileNotFoundError):
        return sorted((int(path.name) for path in run.snapshots.iterdir() if path.name.isdecimal()), reverse=True)
    return []
