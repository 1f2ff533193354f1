"""Snapshots of a TorchTrainer, in the memory of a node and on disk.

Snapshots on disk are committed folders whose files and manifest are sealed with the key of the run.

    snapshots/12/state.pt        the state that all ranks share; written by a node agent from its memory
                 own             the own state of each rank, concatenated in the order of ranks
                 snapshot.json   {"number", "epochs_done", "calls", "round", "size",
                                  "own": [BYTES OF RANK 0, ...], "files": {NAME: [SIZE, MAC]}, "mac"}

Nothing of a snapshot may be unpickled before `newest` has verified and returned it.
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
"""Number of snapshots on disk that are kept; the second newest is used if the newest is damaged."""
ABANDONED_S = 3.0
"""Seconds without growth after which a partial snapshot has no writer any more."""
BUFFERS = 3
"""Buffers in memory: the newest complete snapshot, one being written to disk, and one being filled by ranks."""
_STATE, _OWN, _MANIFEST = "state.pt", "own", "snapshot.json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Durable:
    """A committed snapshot on disk."""

    path: Path
    number: int
    epochs_done: int
    calls: int
    """Number of train() calls that it includes."""
    round: Mapping[str, Any]
    """The record of the round that was open (opaque to this module); empty: none was."""
    size: int
    """World size when it was taken."""
    own: list[bytes] = field(repr=False)
    """The own state of each rank, by rank."""

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
        """Write the state that all ranks share, and return its entry; see `write_sealed`."""
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
        """Write the own states of the ranks, commit the snapshot, and delete all older ones but the previous one.

        `state`: the entry that `write` returned. `own`: by rank. `epochs_done`, `calls`, `round`: see Durable.
        """
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
    """Start a new snapshot with this number, and delete the partial and old folders that killed agents left."""
    for leftover in run.snapshots.glob(".*"):
        # nothing newer: another agent may be writing it
        if _number_of(leftover) <= number:
            disk.remove_tree(leftover)
    partial = Partial(run, number)
    disk.make_folder(partial.path, 0o700)
    return partial


def last_number(run: RunFolder) -> int:
    """Return the highest number of a committed snapshot, even if it is damaged; 0 before the first."""
    return max(_numbers(run), default=0)


def await_writers(run: RunFolder, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until every partial snapshot is committed, or has not grown for ABANDONED_S; call `meanwhile` repeatedly.

    A new driver calls this after the previous driver was killed: the agents of that one still write their newest
    snapshot to disk, and the new driver must not miss it.
    """
    sizes, still_since = _partial_sizes(run), time.monotonic()
    while sizes and time.monotonic() < still_since + ABANDONED_S:
        time.sleep(0.05)
        meanwhile()
        if (now := _partial_sizes(run)) != sizes:
            sizes, still_since = now, time.monotonic()


def _partial_sizes(run: RunFolder) -> dict[Path, int]:
    sizes = {}
    for path in run.snapshots.glob(".*.partial/*"):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes


class Damage(Exception):
    """A snapshot is damaged, or is not of this run."""


class AllDamaged(HpcDetError):
    """A run has snapshots, but all of them are damaged."""


def newest(run: RunFolder) -> Durable | None:
    """Return the newest undamaged snapshot of this run; None if it has none. Skipped ones are logged.

    Reads every byte. Raises AllDamaged: a driver that then trained from the beginning would soon delete the snapshots,
    which the user may be able to repair. Raises NewerFormat.
    """
    folder_format = FolderFormat(_MANIFEST, HmacSeal(run.key()))
    problems = []
    for number in _numbers(run):
        try:
            return _checked(run.snapshots / str(number), folder_format)
        except (Damage, OSError) as problem:
            _log.warning("snapshot %s cannot be used, trying an older one: %s", number, problem)
            problems.append(str(problem))
    if problems:
        remedy = f"restore one, or delete {run.snapshots} to train from the beginning"
        raise AllDamaged([*problems, f"{run.path}: has no undamaged snapshot; {remedy}"])
    return None


def _checked(folder: Path, folder_format: FolderFormat[HmacEntry]) -> Durable:
    try:
        manifest = folder_format.read(folder)
    except (OddManifest, OSError) as error:
        raise Damage(f"{folder}: {folder_format.problem(error)}") from None
    if str(manifest["number"]) != folder.name:
        raise Damage(f"{folder}: {_MANIFEST}: belongs to snapshot {manifest['number']}")
    files = {name: HmacEntry(*manifest["files"][name]) for name in (_STATE, _OWN)}
    if wrong := folder_format.damage(folder, files):
        raise Damage(f"{folder}: {'; '.join(in_words(wrong))}")
    own, seal = (folder / _OWN).read_bytes(), folder_format.seal
    # checked again, since the file may have changed after the check above, and ranks unpickle these bytes
    if change := seal.difference(files[_OWN], seal.of(own)):
        raise Damage(f"{folder}: {_OWN}: {change}")
    return Durable(
        path=folder,
        number=manifest["number"],
        epochs_done=manifest["epochs_done"],
        calls=manifest["calls"],
        round=manifest.get("round", {}),  # missing in snapshots of earlier versions
        size=manifest["size"],
        own=split(own, manifest["own"]),
    )


def split(joined: bytes | bytearray, lengths: Sequence[int]) -> list[bytes]:
    """Return the parts of `joined`, given the length of each in bytes."""
    parts, offset = [], 0
    for length in lengths:
        parts.append(bytes(joined[offset : offset + length]))
        offset += length
    return parts


def _number_of(leftover: Path) -> int:
    """Return the number in `.12.partial` or `.12.old`; 0 for other names."""
    number = leftover.name.split(".")[1]
    return int(number) if number.isdecimal() else 0


def _numbers(run: RunFolder) -> list[int]:
    """Return the numbers of all committed snapshots, newest first."""
    with suppress(FileNotFoundError):
        return sorted((int(path.name) for path in run.snapshots.iterdir() if path.name.isdecimal()), reverse=True)
    return []


# --- in the memory of a node agent, which outlives its ranks


class Buffer:
    """Anonymous shared memory (memfd_create(2)) that ranks write to.

    The kernel frees it when the last process that uses it exits, and counts it as memory of the job.
    """

    def __init__(self, number: int) -> None:
        self.descriptor = os.memfd_create(f"snapshot-{number}")
        self._mapped: mmap.mmap | None = None
        """Reused while it is large enough, so that there is only one page fault for each page."""

    def content(self) -> memoryview:
        """Return what ranks have written, which must not be empty."""
        size = os.fstat(self.descriptor).st_size
        if self._mapped is None or len(self._mapped) < size:
            self._mapped = mmap.mmap(self.descriptor, size, prot=mmap.PROT_READ)
        return memoryview(self._mapped)[:size]


@dataclass(frozen=True)
class Held:
    """A complete snapshot in the memory of a node agent."""

    number: int
    buffer: Buffer
    """The state that all ranks share."""
    progress: dict[str, Any]
    """"epochs_done", "calls" and "round"."""
    own: list[bytes]
    """The own state of each rank (opaque to this module), on the node whose agent writes the snapshot."""

    @classmethod
    def of(cls, order: Message, buffers: list[Buffer]) -> Held:
        """Return the snapshot that the driver describes in `order`, which it sends when all ranks have written."""
        head, body = order
        return cls(head["number"], buffers[head["buffer"]], head["progress"], split(body, head["own"]))


class Keeper:
    """Writes snapshots to disk in a thread, one at a time; a newer snapshot cancels the write of an older one."""

    def __init__(self, run: RunFolder, send: Callable[[dict[str, Any]], None]) -> None:
        """`send`: sends a message to the driver; called by the thread with the return value of `keep`."""
        self._run = run
        self._send = send
        self._newest: Held | None = None
        self._thread: threading.Thread | None = None

    def begin(self, held: Held) -> None:
        """Write `held` in a thread, after the write in progress has ended."""
        self._newest = held
        self._thread = threading.Thread(target=self._keep, args=(held, self._thread), name="writer")
        self._thread.start()

    def settle(self, held: Held | None) -> None:
        """Wait for the thread, and write `held`, the newest snapshot, unless it is on disk.

        Called when the driver has exited: the next driver must not lose a train() call that had returned.
        """
        self._newest = held or self._newest
        if self._thread:
            self._thread.join()
        if held and held.number > last_number(self._run):
            keep(held, self._run)

    def _keep(self, held: Held, former: threading.Thread | None) -> None:
        if former:  # a short wait: `held` is newer, which cancels the former write before its next block
            former.join()
        with suppress(SaveAbandoned):
            self._send(keep(held, self._run, lambda: self._newest is not held))


def keep(held: Held, run: RunFolder, is_superseded: Callable[[], bool] = lambda: False) -> dict[str, Any]:
    """Write `held` to disk, and return a message for the driver: {"kept": number}, with "error" if that failed.

    Raises SaveAbandoned as soon as `is_superseded()`.
    """

    def go_on() -> None:
        if is_superseded():
            raise SaveAbandoned

    try:
        partial = begin(run, held.number)
        partial.commit(partial.write(held.buffer.content(), go_on), held.own, **held.progress)
    except OSError as error:
        return {"kept": held.number, "error": f"{error.filename or run.snapshots}: {error.strerror}"}
    except HpcDetError as error:  # the key of the run was deleted, or other users can read it
        return {"kept": held.number, "error": str(error)}
    return {"kept": held.number}
