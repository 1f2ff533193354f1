"""Snapshots of a TorchTrainer: held in the memory of a node, and durable.

Durable ones are committed folders whose files and manifest are sealed with the key of the run.

    snapshots/12/state.pt        what all ranks share; copied by a node agent out of its memory
                 own             what each rank keeps for itself, one after the other
                 snapshot.json   {"number", "epochs_done", "calls", "round", "size",
                                  "own": [BYTES OF RANK 0, ...], "files": {NAME: [SIZE, MAC]}, "mac"}

Nothing of a snapshot may be unpickled before `newest` has given it.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_det.checkpoint.committed_folder import FolderFormat, OddManifest, delete, in_words
from hpc_det.checkpoint.sealed_files import GoOn, SaveAbandoned, write_sealed
from hpc_det.checkpoint.seals import HmacEntry, HmacSeal
from hpc_det.errors import HpcDetError
from hpc_det.node import disk
from hpc_det.node.frames import Message
from hpc_det.store.run_folder import RunFolder

KEPT = 2
ABANDONED_S = 3.0
BUFFERS = 3
"""The newest whole snapshot, one on its way to the disk, and one that is being written."""
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


# --- in the memory of a node, which outlives the ranks that write to it and nothing else


class Buffer:
    """Memory without a name (memfd_create(2)): nothing to clean up; the job's, like the ranks' own."""

    def __init__(self, number: int) -> None:
        self.descriptor = os.memfd_create(f"snapshot-{number}")
        self._mapped: mmap.mmap | None = None
        """Kept as long as it is large enough: the kernel looks each page up once."""

    def content(self) -> memoryview:
        """What ranks have written; there is some."""
        size = os.fstat(self.descriptor).st_size
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)
        return memoryview(self._mapped)[:size]


@dataclass(frozen=True)
class Held:
    """A whole snapshot in memory."""

    number: int
    buffer: Buffer
    """What all ranks share."""
    progress: dict[str, Any]
    """"epochs_done", "calls" and "round"."""
    own: list[bytes]
    """Of each rank, on the node that writes; opaque here."""

    @classmethod
    def of(cls, order: Message, buffers: list[Buffer]) -> Held:
        """What the driver says once all ranks have answered."""
        head, body = order
        return cls(head["number"], buffers[head["buffer"]], head["progress"], split(body, head["own"]))


class Keeper:
    """Makes snapshots durable, one at a time, in a thread. What is older is given up for what is newer."""

    def __init__(self, run: RunFolder, tell: Callable[[dict[str, Any]], None]) -> None:
        """`tell` is called by another thread with what the driver is to hear."""
        self._run = run
        self._tell = tell
        self._newest: Held | None = None
        self._thread: threading.Thread | None = None

    def begin(self, held: Held) -> None:
        self._newest = held
        self._thread = threading.Thread(target=self._keep, args=(held, self._thread), name="writer")
        self._thread.start()

    def settle(self, held: Held | None) -> None:
        """Make `held`, the newest, durable: the driver is gone, and the next must lose no call that had returned."""
        self._newest = held or self._newest
        if self._thread:
            self._thread.join()
        if held and held.number > last_number(self._run):
            keep(held, self._run)

    def _keep(self, held: Held, former: threading.Thread | None) -> None:
        if former:
            former.join()
        with suppress(SaveAbandoned):
            self._tell(keep(held, self._run, lambda: self._newest is not held))


def keep(held: Held, run: RunFolder, is_superseded: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Make it durable; returns what the driver is sent about it. Raises SaveAbandoned if it was superseded."""

    def go_on() -> None:
        if is_superseded():
            raise SaveAbandoned

    try:
        partial = begin(run, held.number)
        partial.commit(partial.write(held.buffer.content(), go_on), held.own, **held.progress)
    except OSError as error:
        return {"kept": held.number, "error": f"{error.filename or run.snapshots}: {error.strerror}"}
    except HpcDetError as error:  # the key is gone, or no secret any more
        return {"kept": held.number, "error": str(error)}
    return {"kept": held.number}
