"""The site's own settings: `site.yaml` in a folder of HPC_DET_SITE_CONF.

    default_cluster: aurora
    root: /scratch/$USER/hpc_det

Every command reads the file, so it is read without the schema of the configuration.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from hpc_det.errors import UsageError, nearest, or_else, shown
from hpc_det.node.files import is_users_alone
from hpc_det.store.group import Group, name_of_user

SITE_CONF = "HPC_DET_SITE_CONF"
FILE = "site.yaml"
GROUPS = ("cluster", "template")
"""The folders of configuration files in a folder of the site."""


@dataclass(frozen=True)
class Setting:
    """A value of a site.yaml."""

    value: str
    file: Path


@dataclass(frozen=True)
class SiteSettings:
    """The settings of the site; of several folders, the first that has a setting counts."""

    default_cluster: Setting | None = None
    """The profile of commands that name none."""
    root: Setting | None = None
    """The folder of a user's experiments; its variables, such as $USER, are those of the user."""


_KEYS = [field.name for field in fields(SiteSettings)]
_VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")


def site_folders(env: Mapping[str, str]) -> list[Path]:
    """Return the folders of HPC_DET_SITE_CONF.

    Raises UsageError for one that does not exist, that this user may not read, or that too many users can change.
    """
    written = [folder for folder in env.get(SITE_CONF, "").split(os.pathsep) if folder]
    folders = [Path(folder).expanduser().absolute() for folder in written]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UsageError(
            f"{SITE_CONF}: {', '.join(missing)}: no such folder; name the folders that contain the site's cluster/ and "
            f"template/, separated by {os.pathsep!r}, or unset it"
        )
    for folder in folders:
        _check_folder(folder)
    return folders


def _check_folder(folder: Path) -> None:
    for path in (folder, *(folder / group for group in GROUPS)):
        try:
            refuse_writable(path)
        except FileNotFoundError:
            continue
        except PermissionError:
            raise _unreadable(folder) from None
        refuse_unreadable(path)


def refuse_unreadable(path: Path) -> None:
    """Raise UsageError if this user may not read an existing file or folder of the site's configuration."""
    if path.exists() and not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
        raise _unreadable(path)


def _unreadable(path: Path) -> UsageError:
    return UsageError(
        f"{path}: permission denied; the site's configuration must be readable for all users: chmod -R a+rX {path}"
    )


def refuse_writable(path: Path) -> None:
    """Raise UsageError if all users, or all users of this user's primary group, can change a path of the site's
    configuration. Raises OSError if `stat` fails.

    A profile has shell lines that jobs run (`setup`), so whoever can change one can run code as its users. Other groups
    may write, since they may be the site's administrators; `hpc-det doctor` names them.
    """
    found = path.stat()
    if found.st_mode & stat.S_IWOTH:
        who = "every user"
    elif found.st_mode & stat.S_IWGRP and found.st_gid == _primary_group() and not is_users_alone(found.st_gid):
        who = f"every user of your primary group, {Group(found.st_gid).name},"
    else:
        return
    raise UsageError(
        f"{path}: has mode {stat.S_IMODE(found.st_mode):04o}, so {who} can change what your jobs run; its owner, "
        f"{name_of_user(found.st_uid)}, can correct it with `chmod go-w {path}`"
    )


def _primary_group() -> int:
    with suppress(KeyError):  # in a container, the user may have no entry
        return pwd.getpwuid(os.geteuid()).pw_gid
    return os.getegid()


def site_settings(env: Mapping[str, str]) -> SiteSettings:
    """Return the settings of the site. Raises UsageError for a folder or a file that is wrong."""
    found: dict[str, Setting] = {}
    for folder in site_folders(env):
        if (file := folder / FILE).exists():
            found = {**{key: Setting(value, file) for key, value in _read(file).items()}, **found}
    return SiteSettings(**found)


def _read(file: Path) -> dict[str, str]:
    """Return the settings in a site.yaml. Raises UsageError with every problem."""
    import yaml  # here: a site without the file needs no YAML in every command

    try:
        refuse_writable(file)
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except PermissionError:
        raise _unreadable(file) from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{file}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"{file}: got {shown(tree)}; expected a map with keys of {', '.join(_KEYS)}")
    known = f"the keys are {', '.join(_KEYS)}"
    problems = [
        f"{file}: unknown key {key!r}; {or_else(nearest(str(key), _KEYS), known)}" for key in tree if key not in _KEYS
    ]
    problems += [
        f"{file}: {key}: got {shown(value)}; expected a non-empty string"
        for key, value in tree.items()
        if key in _KEYS and value is not None and not (isinstance(value, str) and value.strip() and value.isprintable())
    ]
    if problems:
        raise UsageError(problems)
    return {key: value for key, value in tree.items() if value is not None}


def root_for(setting: Setting, user: str, home: str, env: Mapping[str, str], remedy: str) -> Path:
    """Return the root that the site sets for a user, whose variables other than USER and HOME are in `env`.

    Raises UsageError for a variable that is not set, with the remedy, for other notations of a shell, and for a path
    that is not absolute or the same for all users.
    """
    values = {**env, "USER": user, "HOME": home}
    written = re.sub(r"^~(?=/)", "$HOME", setting.value)
    used = [name or braced for name, braced in _VARIABLE.findall(written)]
    where = f"{setting.file}: root: {setting.value!r}"
    if "$" in _VARIABLE.sub("", written):
        raise UsageError(f"{where} has a $ without the name of a variable; write variables as $NAME or ${{NAME}}")
    if missing := [name for name in used if not values.get(name)]:
        raise UsageError(f"{where} uses ${missing[0]}, which is not set; {remedy}")
    if not used:
        raise UsageError(f"{where} is the same folder for all users; add $USER, as in /scratch/$USER/hpc_det")
    path = Path(_VARIABLE.sub(lambda found: values[found[1] or found[2]], written))
    if not path.is_absolute():
        raise UsageError(f"{where} is not an absolute path; write it as in /scratch/$USER/hpc_det")
    return path


def user_name(env: Mapping[str, str]) -> str:
    """Return the name of this user."""
    with suppress(KeyError):  # in a container, the user may have no entry
        return pwd.getpwuid(os.geteuid()).pw_name
    return env.get("USER", "")
