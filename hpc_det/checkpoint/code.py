"""The code in a trial's checkpoint: compared with the manifest for itself, and restored where a good copy is left.

All checkpoints of an experiment share the files of one copy by hard links, so one damaged bit is in all of them, and
says nothing about what was trained.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from hpc_det.checkpoint.committed import CODE, Committed, FileEntry, checksum
from hpc_det.checkpoint.inspection import in_words
from hpc_det.node.files import make_folders, write_atomic


def mend_code(checkpoint: Committed, own: Iterable[Path], others: Iterable[Path]) -> list[str]:
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
