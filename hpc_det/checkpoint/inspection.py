"""What a checkpoint's folder may hold: regular files that the manifest names, in folders, which nobody else can change.

Files of a checkpoint are loaded and imported, so what somebody else has put there must not be read. Nothing is opened
here: a FIFO would wait for its writer for ever.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from hpc_det.checkpoint.passing_errors import tried_twice
from hpc_det.node.files import is_shared, others_may_write

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def irregularities(folder: Path, sizes: Mapping[str, int] | None = None, known: Collection[str] = ()) -> dict[str, str]:
    """What is wrong, by the name of the entry; "." is `folder` itself.

    `sizes`: of the files that the manifest names; None: there is no manifest, and any regular file may be there.
    `known`: files that may be there besides. So may hidden ones, which nothing loads or imports: NFS calls a file so
    that was removed while it was open, and a killed writer leaves them.

    An owner is trusted who is this user, root or, of a folder that is shared with a group, the owner of the folder
    above.
    """
    try:
        wrong, files = tried_twice(lambda: _look_into(folder))
    except OSError as error:
        return {".": str(error.strerror)}
    if files is None:
        return wrong
    if sizes is None:
        return wrong
    for name in files.keys() - sizes.keys() - {*known}:
        if not Path(name).name.startswith("."):
            wrong.setdefault(name, "not in the manifest")
    for name, size in sizes.items():
        if name not in files:
            wrong.setdefault(name, os.strerror(2))
        elif files[name] != size:
            wrong.setdefault(name, f"{files[name]} bytes, the manifest says {size}")
    return wrong


def _look_into(folder: Path) -> tuple[dict[str, str], dict[str, int] | None]:
    """What is wrong, and the sizes of all files; None for them where it is no folder."""
    top = os.lstat(folder)
    if not stat.S_ISDIR(top.st_mode):
        return {".": f"{kind_of(top.st_mode)}, and no folder"}, None
    wrong = dict(_wrong_entries(folder, _trusted(folder), is_open=bool(top.st_mode & 0o077)))
    return wrong, dict(_files(folder))


def in_words(wrong: Mapping[str, str]) -> list[str]:
    """A sentence each."""
    return [problem if name == "." else f"{name}: {problem}" for name, problem in sorted(wrong.items())]


def kind_of(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def _trusted(folder: Path) -> set[int]:
    return {os.geteuid(), 0, *([os.stat(folder.parent).st_uid] if is_shared(folder) else [])}


def _wrong_entries(folder: Path, trusted: Collection[int], *, is_open: bool) -> Iterator[tuple[str, str]]:
    """`is_open`: others may enter the folder, so that the modes of what is in it count."""
    for name, found in [(".", os.lstat(folder)), *_entries(folder)]:
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            yield name, f"{kind_of(found.st_mode)}, and no file of a checkpoint"
        elif found.st_uid not in trusted:
            yield name, f"owned by {_user(found.st_uid)}, not by {_user(os.geteuid())}"
        elif is_open and others_may_write(found):
            mode = stat.S_IMODE(found.st_mode)
            yield name, f"mode {mode:04o} lets others change it; once you trust it, `chmod -R go-w {folder}`"


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of all that is no folder."""
    return ((name, found.st_size) for name, found in _entries(folder) if not stat.S_ISDIR(found.st_mode))


def _entries(folder: Path, below: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """All in `folder`, at any depth; no link is followed."""
    with os.scandir(folder / below) as found:
        entries = [(f"{below}{entry.name}", entry.stat(follow_symlinks=False)) for entry in found]
    for name, status in entries:
        yield name, status
        if stat.S_ISDIR(status.st_mode):
            yield from _entries(folder, f"{name}/")


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
