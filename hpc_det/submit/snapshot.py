"""The code as it was at submission: the job imports this copy, so an edit while it queues changes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpc_det.errors import UsageError

LIMIT_BYTES = 95 * 1024 * 1024  # Determined's limit for a model definition, 95 MiB
ALWAYS_IGNORED = ("__pycache__/", "*.py[co]", "*$py.class", ".git/", ".mypy_cache/", ".vscode/", ".idea/", ".detignore")


def snapshot_files(context: Path) -> list[Path]:
    """The files of `context` that a job gets, relative, without what `.detignore` (gitignore syntax) names.

    Raises UsageError above 95 MiB, naming the ten largest.
    """
    files = sorted(_kept(context))
    sizes = {file: (context / file).stat().st_size for file in files}
    if sum(sizes.values()) > LIMIT_BYTES:
        largest = sorted(files, key=sizes.__getitem__, reverse=True)[:10]
        raise UsageError(
            f"{context}: the context directory holds {sum(sizes.values())} bytes, the limit is {LIMIT_BYTES} (95 MiB); "
            f"name data in .detignore and read it from shared storage. Largest: "
            + ", ".join(f"{file} ({sizes[file]})" for file in largest)
        )
    return files


def copy_snapshot(context: Path, files: list[Path], target: Path) -> None:
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(context / file, target / file)
    target.mkdir(parents=True, exist_ok=True)


def _kept(context: Path) -> Iterator[Path]:
    from pathspec import GitIgnoreSpec

    ignore_file = context / ".detignore"
    try:
        own = ignore_file.read_text(encoding="utf-8").splitlines() if ignore_file.exists() else []
    except UnicodeDecodeError:
        raise UsageError(f"{ignore_file}: not a text in UTF-8; expected gitignore lines") from None
    ignored = GitIgnoreSpec.from_lines([*ALWAYS_IGNORED, *own])
    for folder, folders, names in os.walk(context, onerror=_unreadable):
        here = Path(folder).relative_to(context)
        folders[:] = [name for name in folders if not ignored.match_file(f"{here / name}/")]
        for name in folders:
            if (context / here / name).is_symlink():
                raise UsageError(
                    f"{context / here / name}: a link to a folder, which a job would lack; copy it, or name it in "
                    f".detignore"
                )
        for name in names:
            # links that lead nowhere (editors' locks) and sockets are no code
            if not ignored.match_file(str(here / name)) and (context / here / name).is_file():
                if not os.access(context / here / name, os.R_OK):
                    raise _unreadable_error(context / here / name)
                yield here / name


def _unreadable(error: OSError) -> None:
    raise _unreadable_error(Path(error.filename))


def _unreadable_error(path: Path) -> UsageError:
    return UsageError(f"{path}: may not be read, so a job would lack it; change its mode, or name it in .detignore")
