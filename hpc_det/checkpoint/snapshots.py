"""Durable snapshots: a folder each, committed by one rename, every file sealed with the key of the run.

    snapshots/12/state.pt        what all ranks share; copied by a node agent out of its memory
                 own             what each rank keeps for itself, one after the other
                 snapshot.json   {"number", "epochs_done", "calls", "round", "size",
                                  "own": [BYTES OF RANK 0, ...], "files": {NAME: [SIZE, MAC]}, "mac"}

Order, each step durable before the next: files, manifest, the partial folder, the rename, the parent folder. Nothing of
a snapshot may be unpickled before `newest` has given it.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_det.checkpoint.committed import delete
from hpc_det.node import disk
from hpc_det.node.files import flush_folder, write_atomic
from hpc_det.node.json_files import write_json
from hpc_det.node.key import derived
from hpc_det.store.run_folder import RunFolder
from hpc_det.store.sealed_file import Sealed, seal, seal_of

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

    @property
    def state(self) -> Path:
        """Where the agent shall write it to (write_sealed)."""
        return self.path / _STATE

    def commit(
        self,
        state: Sealed,
        own: Sequence[bytes],
        *,
        epochs_done: int,
        calls: int,
        round: Mapping[str, Any] = MappingProxyType({}),
    ) -> Durable:
        """When the agent has answered with the seal of its copy. Older ones go, but for the one before."""
        key, joined = self.run.key(), b"".join(own)
        write_atomic(self.path / _OWN, joined)
        content = {
            "number": self.number,
            "epochs_done": epochs_done,
            "calls": calls,
            "round": dict(round),
            "size": len(own),
            "own": [len(part) for part in own],
            "files": {_STATE: state, _OWN: seal(joined, key)},
        }
        write_json(self.path / _MANIFEST, {**content, "mac": _mac_of(content, key)})
        final = self.run.snapshots / str(self.number)
        disk.rename(self.path, final)
        flush_folder(self.run.snapshots)
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


class Damage(Exception):
    """What is wrong with a snapshot."""


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


def newest(run: RunFolder) -> Durable | None:
    """The newest snapshot that is whole and of this run: every byte is read. What is skipped is named in a warning."""
    key = run.key()
    for number in _numbers(run):
        try:
            return _checked(run.snapshots / str(number), key)
        except (Damage, OSError) as problem:
            _log.warning("snapshot %s cannot be used, an older one is looked for: %s", number, problem)
    return None


def _checked(folder: Path, key: bytes) -> Durable:
    manifest = _manifest(folder, key)
    own = (folder / _OWN).read_bytes()
    for name, found in (_OWN, seal(own, key)), (_STATE, seal_of(folder / _STATE, key)):
        expected = Sealed(*manifest["files"][name])
        if found.size != expected.size:
            raise Damage(f"{folder / name}: {found.size} bytes, the manifest says {expected.size}")
        if not hmac.compare_digest(found.mac, expected.mac):
            raise Damage(f"{folder / name}: the content has changed, its seal does not fit")
    return Durable(
        path=folder,
        number=manifest["number"],
        epochs_done=manifest["epochs_done"],
        calls=manifest["calls"],
        round=manifest.get("round", {}),  # snapshots of earlier versions have none
        size=manifest["size"],
        own=split(own, manifest["own"]),
    )


def _manifest(folder: Path, key: bytes) -> dict[str, Any]:
    path = folder / _MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        mac = manifest.pop("mac")
    except (ValueError, LookupError, AttributeError, TypeError):
        raise Damage(f"{path}: torn") from None
    if not hmac.compare_digest(str(mac).encode(), _mac_of(manifest, key).encode()):
        raise Damage(f"{path}: its seal is not of the key of this run; it has changed, or the key has")
    if str(manifest["number"]) != folder.name:
        raise Damage(f"{path}: of snapshot {manifest['number']}")
    return manifest


def _mac_of(manifest: dict[str, Any], key: bytes) -> str:
    """What the files of ranks say must not pass for one of these."""
    return seal(json.dumps(manifest, sort_keys=True).encode(), derived(key, "manifests")).mac


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
