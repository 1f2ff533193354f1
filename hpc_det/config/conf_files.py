"""The files of the groups "cluster" and "template", conf/GROUP/NAME.yaml: of the user, then the site, then hpc_det.

The user's are in `$HPC_DET_ROOT/conf`, the site's in the folders of HPC_DET_SITE_CONF.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from hpc_det.errors import UsageError, nearest, or_else
from hpc_det.node.files import others_may_write
from hpc_det.resources import data_path
from hpc_det.store.experiments import state_root
from hpc_det.store.site_settings import GROUPS, refuse_unreadable, refuse_writable, site_folders

Owner: TypeAlias = Literal["user", "site", "hpc_det"]


class ConfFolder(NamedTuple):
    """A folder with groups of configuration files, and its owner."""

    owner: Owner
    path: Path


def conf_folders(env: Mapping[str, str]) -> list[ConfFolder]:
    """Return the existing folders with groups of configuration files, in the order of precedence.

    Raises UsageError for a folder of the site that does not exist or that too many users can change, and for files of
    the user that others can change.
    """
    root = state_root(env)
    _refuse_open_conf(root)
    folders = [
        ConfFolder("user", root / "conf"),
        *(ConfFolder("site", folder) for folder in site_folders(env)),
        ConfFolder("hpc_det", data_path("conf")),
    ]
    return [folder for folder in folders if folder.path.is_dir()]


def _refuse_open_conf(root: Path) -> None:
    """Raise UsageError if other users can pass through `root`, such as those with whom experiments are shared, and can
    change a file below its `conf`, which users create with their own umask.
    """
    conf = root / "conf"
    if not conf.is_dir() or not root.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        return
    for path in (conf, *(conf / group for group in GROUPS), *conf.glob("*/*.yaml")):
        if path.exists() and others_may_write(path.stat()):
            mode = stat.S_IMODE(path.stat().st_mode)
            raise UsageError(
                f"{path}: has mode {mode:04o}, so others may change what your jobs run; `chmod -R go-w {conf}`"
            )


def group_files(group: str, env: Mapping[str, str]) -> dict[str, list[tuple[Owner, Path]]]:
    """Return the files of each name in a group; the first one is used and hides the others."""
    found: dict[str, list[tuple[Owner, Path]]] = {}
    for owner, folder in conf_folders(env):
        for file in sorted((folder / group).glob("*.yaml")):
            found.setdefault(file.stem, []).append((owner, file))
    return found


def find(group: str, name: str, env: Mapping[str, str], source: str = "") -> Path:
    """Return the file of `name` in the group "cluster" or "template". Raises UsageError that names the known ones, and
    for a file of the site that this user may not read, or that too many users can change.

    `source`: what contains the name, for the message; default: the group.
    """
    found = group_files(group, env)
    if name not in found:
        raise unknown_choice(group, name, found, source)
    (owner, file), *_hidden = found[name]
    if owner == "site":
        refuse_unreadable(file)
        with suppress(OSError):  # who reads it reports that
            refuse_writable(file)
    return file


def unknown_choice(group: str, name: str, known: Iterable[str], source: str = "") -> UsageError:
    """Return the error for a name without a file in its group. `source`: what contains the name."""
    names = sorted(known)
    known = or_else(nearest(name, names), f"known: {', '.join(names)}")
    return UsageError(f"{source or group}: no {group} is called {name!r}; {known}")
