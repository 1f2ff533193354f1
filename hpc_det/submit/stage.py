"""Writes the archive of the Python environment, of which nodes make local copies (hpc_det.launch.staged).

Each Python environment has one archive, in the folder of bundles. It contains all of a venv or conda environment. What
the environment refers to outside of it is used from there: the standard library of a venv, and editable installations.
The tar file is not compressed: the nodes then need no tool for it, and unpacking takes as long as writing the files.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hpc_det.errors import say
from hpc_det.node import disk
from hpc_det.node.environment_archive import (
    Archive,
    NotStaged,
    digest_of,
    files_of,
    insist_on_installed,
    read_archive,
    shared_prefix,
)
from hpc_det.node.files import replacement_of
from hpc_det.node.import_bundle import UnusableBundle, names_in, state_of

_LEFT_OUT = ("pkgs", "envs")
"""Folders of a conda installation: its cache, and its other environments."""
_ZSTD = ("-comp", "zstd", "-Xcompression-level", "3")


def archive_path(root: Path, kind: str) -> Path:
    """Return the path of this environment's archive, which may not exist.

    `root`: the folder of experiments. `kind`: tar or image, the suffix of the path.
    """
    return root / ".bundles" / f"{hashlib.sha256(shared_prefix().encode()).hexdigest()[:16]}.{kind}"


def is_current(path: Path) -> bool:
    """Return whether the archive contains all files as they are now."""
    try:
        archive = read_archive(str(path))
        insist_on_installed(archive)
        is_of_kind = archive.is_image == _is_image(path)
        return is_of_kind and digest_of(files_of(archive.prefix, _LEFT_OUT)) == archive.digest
    except (NotStaged, OSError):
        return False


def make_current(path: Path) -> None:
    """Write the archive if it is not current. If that fails, print a note: jobs use the environment itself."""
    if is_current(path):
        return
    say(f"writing {path}, from which nodes copy the Python environment; later submissions use it again")
    try:
        archive = write_archive(path)
    except (NotStaged, OSError) as error:
        say(f"note: environment.stage: {error}; the nodes will use {shared_prefix()} itself")
        disk.unlink(path, missing_ok=True)  # nodes would refuse it
        return
    if path.suffix == ".image" and not archive.is_image:
        say("note: environment.stage: mksquashfs is not installed here; the nodes will unpack a tar file instead")


def write_archive(path: Path) -> Archive:
    """Write the archive, and replace a former one. Raises NotStaged, OSError.

    An image becomes a tar file if mksquashfs is not installed. Nodes that read the former archive go on with it, or use
    the environment itself.
    """
    archive = _installed(is_image=_is_image(path))
    with replacement_of(path) as (partial, descriptor):
        ended = subprocess.run(_command(archive, partial), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if ended.returncode:
            raise NotStaged(f"{ended.args[0]} failed: {ended.stderr.strip()[-300:]}")
        disk.write_all(descriptor, archive.trailer(os.fstat(descriptor).st_size))
    return read_archive(str(path))


def _is_image(path: Path) -> bool:
    return path.suffix == ".image" and shutil.which("mksquashfs") is not None


def _installed(*, is_image: bool) -> Archive:
    prefix = shared_prefix()
    if not any(os.path.exists(os.path.join(prefix, name)) for name in ("pyvenv.cfg", "conda-meta")):
        raise NotStaged(f"{prefix} is neither a venv nor a conda environment; install hpc_det into one")
    site = os.path.join(prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    try:
        names = sorted(names_in(site))
    except UnusableBundle as error:
        raise NotStaged(str(error)) from None
    records = (f"{site}/{name}/RECORD" for name in names if name.endswith(".dist-info"))
    files = files_of(prefix, _LEFT_OUT)
    return Archive(
        is_image=is_image,
        prefix=prefix,
        digest=digest_of(files),
        files=len(files),
        names={site: names},
        records={path: state for path in records if (state := state_of(path))},
    )


def _command(archive: Archive, target: Path) -> list[str]:
    if archive.is_image:
        return ["mksquashfs", archive.prefix, str(target), "-noappend", "-no-progress", *_ZSTD, "-e", *_LEFT_OUT]
    left_out = [f"--exclude=./{name}" for name in _LEFT_OUT]
    return ["tar", "--create", f"--file={target}", *left_out, f"--directory={archive.prefix}", "."]
