"""The code as it was at submission: the job imports this copy, so an edit while it queues changes nothing.

It holds the context directory and what is included beside its files. The rules are Determined's (its
harness/determined/common/context.py and detignore.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, TypeAlias

from hpc_det.config.entrypoint import Context
from hpc_det.errors import UsageError
from hpc_det.node.files import flush_tree, make_folders, share_copy

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT_BYTES = 95 * 1024 * 1024  # Determined's limit for a model definition, 95 MiB
ALWAYS_IGNORED = (
    *("__pycache__/", "*.py[co]", "*$py.class", ".mypy_cache/"),
    *(".git/", ".vscode/", ".idea/"),
    *(".terraform*", "*.tfstate*"),
    ".detignore",
)
"""Whatever a .detignore says. Determined ignores files of terraform since those hold the keys of a cluster."""
Snapshot: TypeAlias = dict[Path, Path]
"""The files of a copy, relative to it, in order, and where each lies before."""


def snapshot_files(context: Context) -> Snapshot:
    """What a job gets. Each folder, the context directory or an included one, is taken without what its own .detignore
    (gitignore syntax) names; an included file is taken whatever its name.

    Raises UsageError above 95 MiB, naming the ten largest files, and where two things would have the same place.
    """
    sizes = _sized_files(context.folder, Path())
    sources = {place: context.folder / place for place in sizes}
    roots = {place.parts[0]: context.folder / place.parts[0] for place in sizes}
    for include in context.includes:
        _insist_on_own_place(include, roots)
        roots[include.name] = include
        added = _sized_files(include, Path(include.name)) if include.is_dir() else _sized_file(include)
        sizes |= added
        sources |= {place: include.parent / place for place in added}
    _insist_on_limit(context, sizes)
    return {place: sources[place] for place in sorted(sources)}


def left_out(folder: Path) -> Callable[[str], bool]:
    """Says of a name, relative to `folder`, whether a copy is made without it. It need not be there. What an ignored
    folder holds is left out whatever else is said of it, since such a folder is not looked into.
    """
    ignored = _ignored(folder)
    return lambda name: (
        ignored.match_file(name) or any(ignored.match_file(f"{above}/") for above in PurePath(name).parents[:-1])
    )


def copy_snapshot(files: Snapshot, target: Path) -> None:
    """Durable when it returns. Raises UsageError for a file that has gone, or may not be read any more."""
    make_folders(target)
    for place, source in files.items():
        make_folders((target / place).parent)
        try:
            shutil.copy2(source, target / place)
        except OSError as error:
            raise UsageError(f"{source}: could not be copied for the job: {error.strerror}") from None
        share_copy(target / place)
    flush_tree(target)


def _insist_on_own_place(include: Path, roots: Mapping[str, Path]) -> None:
    if not include.name:
        raise UsageError(f"--include {include}: has no name that it could have beside the code; name what is in it")
    if other := roots.get(include.name):
        raise UsageError(
            f"--include {include}: would have the place of {other}, since both are called {include.name!r}; rename one "
            f"of them, or leave one out"
        )


def _insist_on_limit(context: Context, sizes: Mapping[Path, int]) -> None:
    if (total := sum(sizes.values())) <= LIMIT_BYTES:
        return
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:10]
    included = f" with {', '.join(map(str, context.includes))}" if context.includes else ""
    raise UsageError(
        f"{context.folder}: the context directory{included} holds {total} bytes, the limit is {LIMIT_BYTES} (95 MiB); "
        f"name data in .detignore and read it from shared storage. Largest: "
        + ", ".join(f"{place} ({sizes[place]})" for place in largest)
    )


def _sized_file(path: Path) -> dict[Path, int]:
    if not path.is_file():
        raise UsageError(f"--include {path}: is neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise _unreadable(path)
    return {Path(path.name): path.stat().st_size}


def _sized_files(folder: Path, place: Path) -> dict[Path, int]:
    """The size of each file of `folder` that is not ignored, by its place in the copy; folder's own is `place`."""
    return {place / name: size for name, size in _walk(str(folder), "", _ignored(folder))}


def _walk(folder: str, prefix: str, ignored: GitIgnoreSpec) -> Iterator[tuple[str, int]]:
    """Names below `folder`, relative to where the walk began. A folder that is ignored is not looked into."""
    try:
        entries = [*os.scandir(folder)]
    except OSError:
        raise _unreadable(Path(folder)) from None
    for entry in entries:
        name = f"{prefix}{entry.name}"
        if entry.is_dir():
            if ignored.match_file(f"{name}/"):
                continue
            if entry.is_symlink():
                raise UsageError(
                    f"{entry.path}: a link to a folder, which a job would lack; copy it, or name it in .detignore"
                )
            yield from _walk(entry.path, f"{name}/", ignored)
        elif entry.is_file() and not ignored.match_file(name):  # editors' locks are links to nowhere, and no files
            if not os.access(entry.path, os.R_OK):
                raise _unreadable(Path(entry.path))
            yield name, entry.stat().st_size


def _ignored(folder: Path) -> GitIgnoreSpec:
    from pathspec import GitIgnoreSpec

    file = folder / ".detignore"
    try:
        own = file.read_text(encoding="utf-8-sig").splitlines() if file.exists() else []
        return GitIgnoreSpec.from_lines([*own, *ALWAYS_IGNORED])
    except UnicodeDecodeError:
        raise UsageError(f"{file}: not a text in UTF-8; expected gitignore lines") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}; expected gitignore lines") from None
    except ValueError as error:  # of pathspec
        raise UsageError(f"{file}: {error}; expected gitignore lines") from None


def _unreadable(path: Path) -> UsageError:
    return UsageError(f"{path}: may not be read, so a job would lack it; change its mode, or name it in .detignore")
