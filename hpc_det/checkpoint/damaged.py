"""Checkpoints that are not whole are set aside: renamed and kept, so that nothing counts them, and nothing is lost.

    checkpoints/.damaged-UUID        its folder
                .damaged-UUID.json   {"uuid", "steps", "time", "problems", "place"}: what was found, and when

A hidden name is no checkpoint for whoever lists them: neither for retention nor for progress.

The code in a checkpoint is compared with the manifest for itself, and repaired where a good copy is left: all
checkpoints of an experiment share the files of one copy by hard links, so one damaged bit is in all of them, and has no
part in what was trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from hpc_det.checkpoint.committed import CODE, Committed, checksum
from hpc_det.checkpoint.committed_folder import in_words
from hpc_det.checkpoint.reading import may_pass
from hpc_det.checkpoint.seals import FileEntry
from hpc_det.errors import HpcDetError
from hpc_det.node import disk, full_disk
from hpc_det.node.files import flush_folder, make_folders, write_atomic
from hpc_det.node.json_files import read_json, write_json

_PREFIX, _RECORD = ".damaged-", ".json"


@dataclass(frozen=True, kw_only=True)
class Damaged:
    """A checkpoint that was set aside."""

    uuid: str
    steps: int | None
    """Batches trained; None: unknown."""
    time: float
    """When it was set aside; seconds since the epoch."""
    problems: list[str]
    place: str
    """Where it is now."""


def set_aside(folder: Path, steps: int | None, problems: list[str]) -> str:
    """Rename the checkpoint in `folder`, and return where it is now, for a message.

    Only for the process that writes the checkpoints beside `folder`. Raises HpcDetError where it cannot be renamed: it
    would count as the newest, and each new checkpoint be deleted for its sake; OSError for an error that may pass, such
    as of a full disk.
    """
    aside = folder.with_name(f"{_PREFIX}{folder.name}")
    try:
        if os.path.isdir(aside) and not os.path.islink(aside):
            disk.remove_tree(aside)  # of the same checkpoint, which came back from a store
        disk.rename(folder, aside)
        flush_folder(folder.parent)
        return record_damage(folder.parent, folder.name, steps, problems, str(aside))
    except OSError as error:
        if may_pass(error):
            raise
        raise HpcDetError(
            f"{folder}: damaged ({'; '.join(problems)}), and cannot be renamed to {aside.name}: {error.strerror}; "
            f"move it away"
        ) from None


def record_damage(checkpoints: Path, uuid: str, steps: int | None, problems: list[str], place: str) -> str:
    """Write down what was found in a checkpoint that is at `place` now."""
    found = Damaged(uuid=uuid, steps=steps, time=time.time(), problems=problems, place=place)
    kept = f"; set aside, and kept as {place}"
    try:
        write_json(checkpoints / f"{_PREFIX}{uuid}{_RECORD}", asdict(found))
    except OSError as error:
        if not full_disk.cause_in(error):
            raise
        return f"{kept}, which is not noted: {full_disk.sentence(error)}"  # the log has it
    return kept


def damaged_ones(checkpoints: Path) -> list[Damaged]:
    """Those that were set aside, the oldest first."""
    try:
        names = [name for name in os.listdir(checkpoints) if name.startswith(_PREFIX)]
    except OSError:
        return []
    uuids = {name.removeprefix(_PREFIX).removesuffix(_RECORD) for name in names}
    return sorted((_known(checkpoints, uuid) for uuid in uuids), key=lambda found: (found.time, found.uuid))


def _known(checkpoints: Path, uuid: str) -> Damaged:
    """A kill between the rename and the record leaves the folder alone."""
    folder = checkpoints / f"{_PREFIX}{uuid}"
    try:
        return Damaged(**(read_json(folder.with_name(f"{folder.name}{_RECORD}")) or {}))
    except (ValueError, TypeError, OSError):
        return Damaged(uuid=uuid, steps=None, time=0.0, problems=["no record says why"], place=str(folder))


def remove_damaged(checkpoints: Path, uuid: str) -> None:
    """For good, as its owner wants."""
    disk.remove_tree(checkpoints / f"{_PREFIX}{uuid}")
    disk.unlink(checkpoints / f"{_PREFIX}{uuid}{_RECORD}", missing_ok=True)


def repair_code(checkpoint: Committed, own: Iterable[Path], others: Iterable[Path]) -> list[str]:
    """Restore the code in `checkpoint`, and in the folders `own`, from where a file still is as the manifest says.

    `others`: folders that are only read. Returns a sentence for all that was damaged.
    """
    owned, sources = [checkpoint.path / CODE, *own], [*others]
    found = _planted(checkpoint)
    for name, entry in checkpoint.code.items():
        below = PurePosixPath(name).relative_to(CODE)
        damaged = [folder / below for folder in owned if not _is_good(folder / below, entry)]
        if not damaged:
            continue
        copies = (folder / below for folder in [*owned, *sources])
        good = next((path for path in copies if path not in damaged and _is_good(path, entry)), None)
        found += [_restored(path, good) for path in damaged]
    return found


def _planted(checkpoint: Committed) -> list[str]:
    wrong = checkpoint.irregularities(checkpoint.path, is_code=True)
    return in_words({name: problem for name, problem in wrong.items() if name not in checkpoint.code})


def _is_good(path: Path, entry: FileEntry) -> bool:
    try:
        return path.lstat().st_size == entry.size and checksum(path) == entry
    except OSError:
        return False


def _restored(path: Path, good: Path | None) -> str:
    if good is None:
        return f"{path} is damaged, and no good copy is left; what was trained is whole"
    try:
        make_folders(path.parent)
        write_atomic(path, good.read_bytes())
        os.chmod(path, good.stat().st_mode & 0o555)
    except OSError as error:
        return f"{path} is damaged, and cannot be restored from {good}: {error.strerror}; what was trained is whole"
    return f"{path} was damaged; it is restored from {good}"
