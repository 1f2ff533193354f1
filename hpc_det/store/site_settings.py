"""The site's own settings: `site.yaml` in a folder of HPC_DET_SITE_CONF.

    default_cluster: aurora
    root: /scratch/$USER/hpc_det

Every command reads the file, so it is read without the schema of the configuration.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from hpc_det.errors import UsageError, nearest, or_else, shown

SITE_CONF = "HPC_DET_SITE_CONF"
FILE = "site.yaml"


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


def site_folders(env: Mapping[str, str]) -> list[Path]:
    """Return the folders of HPC_DET_SITE_CONF. Raises UsageError for one that does not exist."""
    written = [folder for folder in env.get(SITE_CONF, "").split(os.pathsep) if folder]
    folders = [Path(folder).expanduser().absolute() for folder in written]
    if missing := [str(folder) for folder in folders if not folder.is_dir()]:
        raise UsageError(
            f"{SITE_CONF}: {', '.join(missing)}: no such folder; name the folders that contain the site's cluster/ and "
            f"template/, separated by {os.pathsep!r}, or unset it"
        )
    return folders


def site_settings(env: Mapping[str, str]) -> SiteSettings:
    """Return the settings of the site. Raises UsageError for a folder or a file that is wrong."""
    found: dict[str, Setting] = {}
    for folder in site_folders(env):
        if (file := folder / FILE).is_file():
            found = {**{key: Setting(value, file) for key, value in _read(file).items()}, **found}
    return SiteSettings(**found)


def _read(file: Path) -> dict[str, str]:
    """Return the settings in a site.yaml. Raises UsageError with every problem."""
    import yaml  # here: a site without the file needs no YAML in every command

    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; the site's settings must be readable for all users") from None
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

    Raises UsageError for a variable that is not set, with the remedy, and for a path that is not absolute or the same
    for all users.
    """
    values = {**env, "USER": user, "HOME": home}
    written = re.sub(r"^~(?=/)", "$HOME", setting.value)
    used = [name or braced for name, braced in re.findall(r"\$(?:(\w+)|\{(\w+)\})", written)]
    where = f"{setting.file}: root: {setting.value!r}"
    if missing := [name for name in used if not values.get(name)]:
        raise UsageError(f"{where} uses ${missing[0]}, which is not set; {remedy}")
    if not used:
        raise UsageError(f"{where} is the same folder for all users; add $USER, as in /scratch/$USER/hpc_det")
    path = Path(re.sub(r"\$(?:(\w+)|\{(\w+)\})", lambda found: values[found[1] or found[2]], written))
    if not path.is_absolute():
        raise UsageError(f"{where} is not an absolute path; write it as in /scratch/$USER/hpc_det")
    return path


def user_name(env: Mapping[str, str]) -> str:
    """Return the name of this user."""
    with suppress(KeyError):  # in a container, the user may have no entry
        return pwd.getpwuid(os.geteuid()).pw_name
    return env.get("USER", "")
