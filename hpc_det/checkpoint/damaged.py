"""Damaged checkpoints are set aside: renamed and kept, so that nothing is lost.

    checkpoints/.damaged-UUID        the folder of the checkpoint
                .damaged-UUID.json   {"uuid", "steps", "time", "problems", "place"}: the record

Hidden folders are not listed as checkpoints, so a damaged one counts neither for retention nor as progress.

Damaged code does not disqualify a checkpoint, since the training state does not depend on it. Its files are restored
from undamaged copies instead, such as the code folder of the experiment. Other checkpoints of the experiment do not
help: all of them share one copy of the code by hard links, so they have the same damage.
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
    """When it was set aside, in seconds since the epoch."""
    problems: list[str]
    place: str
    """Its folder, or its URL in an object store."""


def set_aside(folder: Path, steps: int | None, problems: list[str]) -> str:
    """Rename the damaged checkpoint in `folder`, record it, and return text for a message: where it is now.

    Only the process that writes the checkpoints beside `folder` may call this. Raises HpcDetError if the checkpoint
    cannot be renamed, and OSError if the cause may be temporary, such as a full disk.
    """
    aside = folder.with_name(f"{_PREFIX}{folder.name}")
    try:
        if os.path.isdir(aside) and not os.path.islink(aside):
            disk.remove_tree(aside)  # set aside earlier, then downloaded again from the object store
        disk.rename(folder, aside)
        flush_folder(folder.parent)
        return record_damage(folder.parent, folder.name, steps, problems, str(aside))
    except OSError as error:
        if may_pass(error):
            raise
        # In its place it would still count as the newest checkpoint: retention would keep it, and delete each new one
        # with fewer batches.
        raise HpcDetError(
            f"{folder}: damaged ({'; '.join(problems)}); renaming it to {aside.name} failed: {error.strerror}; "
            f"move it to another folder"
        ) from None


def record_damage(checkpoints: Path, uuid: str, steps: int | None, problems: list[str], place: str) -> str:
    """Write the record of a damaged checkpoint that is at `place` now, and return text for a message."""
    found = Damaged(uuid=uuid, steps=steps, time=time.time(), problems=problems, place=place)
    kept = f"; set aside, and kept as {place}"
    try:
        write_json(checkpoints / f"{_PREFIX}{uuid}{_RECORD}", asdict(found))
    except OSError as error:
        if not full_disk.cause_in(error):
            raise
        return f"{kept}; recording it failed: {full_disk.sentence(error)}"  # the caller logs the problems
    return kept


def damaged_ones(checkpoints: Path) -> list[Damaged]:
    """Return the checkpoints that were set aside, oldest first."""
    try:
        names = [name for name in os.listdir(checkpoints) if name.startswith(_PREFIX)]
    except OSError:
        return []
    uuids = {name.removeprefix(_PREFIX).removesuffix(_RECORD) for name in names}
    return sorted((_known(checkpoints, uuid) for uuid in uuids), key=lambda found: (found.time, found.uuid))


def _known(checkpoints: Path, uuid: str) -> Damaged:
    """Return the record of a damaged checkpoint, or a substitute without a cause if it has no readable record."""
    folder = checkpoints / f"{_PREFIX}{uuid}"
    try:
        return Damaged(**(read_json(folder.with_name(f"{folder.name}{_RECORD}")) or {}))
    except (ValueError, TypeError, OSError):  # for instance after a kill between the rename and the record
        return Damaged(uuid=uuid, steps=None, time=0.0, problems=["the cause was not recorded"], place=str(folder))


def remove_damaged(checkpoints: Path, uuid: str) -> None:
    """Delete the folder and the record of a damaged checkpoint."""
    disk.remove_tree(checkpoints / f"{_PREFIX}{uuid}")
    disk.unlink(checkpoints / f"{_PREFIX}{uuid}{_RECORD}", missing_ok=True)


def repair_code(checkpoint: Committed, own: Iterable[Path], others: Iterable[Path]) -> list[str]:
    """Restore damaged files of the code in `checkpoint` and in the folders `own` from undamaged copies.

    `own` and `others` contain the same code; `others` are only read. Returns a sentence for each damaged file, and for
    each file that the manifest does not name.
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
        return f"{path} is damaged, and no undamaged copy was found; the training state is not affected"
    try:
        make_folders(path.parent)
        write_atomic(path, good.read_bytes())
        os.chmod(path, good.stat().st_mode & 0o555)  # read-only: several checkpoints may share the file by hard links
    except OSError as error:
        return f"{path} is damaged; restoring it from {good} failed: {error.strerror}; training state not affected"
    return f"{path} was damaged; restored from {good}"
