"""The archive of a Python environment, from which nodes make local copies (hpc_det.launch.staged).

    a tar file, or a squashfs image
    index    JSON: the fields of `Archive`
    footer   hpc-det-stage FORMAT INDEX_BYTES FILE_BYTES

tar(1) and squashfs ignore what follows their own end. The archive contains code that is executed, so a file that
another user could have written is refused, like a bundle (hpc_det.node.import_bundle).
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass

from hpc_det.node.import_bundle import FileState, UnusableBundle, insist_on_owner, names_in, state_of

FOOTER_BYTES = 128
ORIGIN = ".hpc-det-origin"
"""File beside a local copy with the path of the environment that was copied."""
_FORMAT = b"hpc-det-stage 1"
_READERS = 32
"""Threads that look at files, most of whose time is the wait for a file server."""


class NotStaged(Exception):
    """The environment cannot be used from a local copy; the message says why and what to do."""


@dataclass(frozen=True)
class Archive:
    """The index of an archive."""

    is_image: bool
    """Whether it is a squashfs image; else a tar file."""
    prefix: str
    """The path of the environment, sys.prefix."""
    digest: str
    """Identifies the state of all files (`digest_of`)."""
    files: int
    names: Mapping[str, list[str]]
    """The names in the folder of packages, keyed by its path."""
    records: Mapping[str, FileState]
    """The state of each distribution's RECORD file, which an installer rewrites, keyed by path."""
    size_bytes: int = 0
    """Size of the archive; set by `read_archive`."""

    def trailer(self, size_bytes: int) -> bytes:
        """Return the index and the footer, for an archive that has `size_bytes` before them."""
        index = json.dumps(asdict(self)).encode()
        footer = b"%s %d %d" % (_FORMAT, len(index), size_bytes + len(index) + FOOTER_BYTES)
        return index + footer.ljust(FOOTER_BYTES)


def read_archive(path: str) -> Archive:
    """Return what the archive contains. Raises NotStaged if it does not exist, or is damaged or unsafe."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            insist_on_owner(found, os.stat(os.path.dirname(path)))
            file.seek(max(found.st_size - FOOTER_BYTES, 0))
            footer = file.read().split()
            index_bytes, file_bytes = map(int, footer[-2:])
            if footer[:-2] != _FORMAT.split() or file_bytes != found.st_size:
                raise ValueError
            file.seek(file_bytes - FOOTER_BYTES - index_bytes)
            index = json.loads(file.read(index_bytes))
        records = {name: tuple(state) for name, state in index["records"].items()}
        return Archive(**{**index, "records": records, "size_bytes": file_bytes})
    except OSError as error:
        why = error.strerror
    except UnusableBundle as error:
        why = str(error)
    except (ValueError, TypeError, KeyError):
        why = "it is damaged, or was written by another version of hpc_det"
    raise NotStaged(f"{path}: {why}; `hpc-det environment stage` writes a new one")


def insist_on_installed(archive: Archive) -> None:
    """Raise NotStaged if a package was changed, added or removed since the archive was written.

    One stat(2) per distribution, as for a bundle. A file that is edited in place is seen at the next submission.
    """
    changed = next((path for path, found in archive.records.items() if state_of(path) != found), None)
    try:
        added = [folder for folder, names in archive.names.items() if names_in(folder) != {*names}]
    except UnusableBundle as error:
        added = [str(error)]
    if where := [os.path.dirname(changed)] if changed else added:
        raise NotStaged(
            f"the packages in {where[0]} are not those in the archive any more; `hpc-det environment stage` writes a "
            "new one"
        )


def files_of(folder: str, left_out: Collection[str] = ()) -> dict[str, FileState]:
    """Return size and time [s] of all files in a folder, keyed by relative path, without byte code. Raises OSError.

    `left_out`: names in the folder that do not count. Python writes byte code whenever it imports a module.
    """
    from concurrent.futures import ThreadPoolExecutor  # agents import this module, and few make a copy

    found: dict[str, FileState] = {}
    folders = [""]
    with ThreadPoolExecutor(_READERS) as readers:
        while folders:
            below: list[str] = []
            for files, inner in readers.map(lambda part: _look(folder, part), folders):
                found.update(files)
                below += inner
            folders = [each for each in below if each not in left_out]
    return found


def _look(top: str, part: str) -> tuple[dict[str, FileState], list[str]]:
    files: dict[str, FileState] = {}
    folders = []
    with os.scandir(os.path.join(top, part)) as entries:
        for entry in entries:
            path = os.path.join(part, entry.name)
            if entry.is_dir(follow_symlinks=False):
                folders += [path] if entry.name != "__pycache__" else []
            else:
                status = entry.stat(follow_symlinks=False)
                # A squashfs image has whole seconds.
                files[path] = status.st_size, 0 if stat.S_ISLNK(status.st_mode) else status.st_mtime_ns // 10**9
    return files, folders


def digest_of(files: Mapping[str, FileState]) -> str:
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]


def shared_prefix() -> str:
    """Return the path of this Python environment on the shared file system, also in a local copy of it."""
    try:
        with open(os.path.join(os.path.dirname(sys.prefix), ORIGIN)) as file:
            return file.read()
    except OSError:
        return sys.prefix


def shared_python() -> str:
    """Return the path of this Python interpreter on the shared file system, also in a local copy of it."""
    prefix = shared_prefix()
    return sys.executable if prefix == sys.prefix else prefix + sys.executable.removeprefix(sys.prefix)


def on_any_node(python: str) -> list[str]:
    """Return the begin of a command that runs `python` on any node of the gang.

    Another node may not have a local copy, or have it elsewhere; the interpreter on the shared file system is used
    there.
    """
    shared = shared_python()
    if python != sys.executable or shared == python:
        return [python]
    # Not sh, which may be dash: it does not pass the mask of blocked signals on.
    return ["bash", "-c", '[ -x "$0" ] && { shift; exec "$0" "$@"; }; exec "$@"', python, shared]
