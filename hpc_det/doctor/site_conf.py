"""Checks of the site's configuration: whether it can be read, and who may change it."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_det.doctor import Finding
from hpc_det.errors import UsageError
from hpc_det.node.files import is_users_alone
from hpc_det.store.group import Group, name_of_user
from hpc_det.store.site_settings import FILE, GROUPS, refuse_writable, site_folders, site_settings

SUBJECT = "site"
_FOR_OTHERS = stat.S_IRGRP | stat.S_IROTH


def findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the findings on the folders of HPC_DET_SITE_CONF; none if it is not set.

    Raises UsageError if every command would end with it.
    """
    site_settings(env)
    for folder in site_folders(env):
        paths = _paths(folder)
        for path in paths:
            if path.exists() and not path.stat().st_mode & _FOR_OTHERS:
                mode = stat.S_IMODE(path.stat().st_mode)
                message = f"{path} has mode {mode:04o}: only its owner, {name_of_user(path.stat().st_uid)}, can read it"
                yield Finding(SUBJECT, "problem", message, f"chmod a+rX {path}")
        too_many = [problem for path in paths if (problem := _problem(path))]
        for problem in too_many:
            yield Finding(SUBJECT, "problem", problem, "correct that, or ask the site")
        if too_many:
            continue
        owners, groups = _writers(paths)
        message = f"{folder}: only {', '.join([*owners, *(f'group {name}' for name in groups)])} can change it"
        if groups:
            remedy = f"unless these groups have only administrators: chmod -R g-w {folder}"
            yield Finding(SUBJECT, "note", f"{message}, and so what the jobs of all users run", remedy)
        else:
            yield Finding(SUBJECT, "ok", message)


def _paths(folder: Path) -> list[Path]:
    """Return what commands read of a folder of the site, also what does not exist."""
    groups = [folder / group for group in GROUPS]
    return [folder, folder / FILE, *groups, *(file for group in groups for file in sorted(group.glob("*.yaml")))]


def _problem(path: Path) -> str:
    """Return why too many users can change `path`; empty if they cannot, or if it does not exist."""
    try:
        with suppress(OSError):
            refuse_writable(path)
    except UsageError as error:
        return str(error)
    return ""


def _writers(paths: list[Path]) -> tuple[list[str], list[str]]:
    """Return the names of the users and of the groups that can change one of the paths."""
    found = []
    for path in paths:
        with suppress(OSError):
            found.append(path.stat())
    groups = [each.st_gid for each in found if each.st_mode & stat.S_IWGRP and not is_users_alone(each.st_gid)]
    owners = dict.fromkeys(each.st_uid for each in found)
    return [name_of_user(number) for number in owners], [Group(number).name for number in dict.fromkeys(groups)]
