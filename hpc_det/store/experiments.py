"""The state root of a user, and the experiments below it."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpc_det.errors import UsageError, remedy_of
from hpc_det.node import disk
from hpc_det.node.files import PRIVATE_FOLDER, flush_folder, make_private, others_may_write, share
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.group import Group
from hpc_det.store.site_settings import root_for, site_settings, user_name

_DELETED = ".deleted-"
FOLDER = "hpc_det"
"""Name of the default state root in the user's home folder."""
VARIABLE = "HPC_DET_ROOT"


def state_root(env: Mapping[str, str]) -> Path:
    """Return the folder of all experiments of this user. Raises UsageError if other users can change files that jobs
    run.
    """
    root = configured_root(env)
    if problem := danger(root.path):
        raise UsageError(f"{root.origin}: {root.path} {': '.join(problem)}")
    return root.path


class Root(NamedTuple):
    """A state root, and what sets it."""

    path: Path
    origin: str
    """HPC_DET_ROOT, the site's file, or "the default"."""


def configured_root(env: Mapping[str, str]) -> Root:
    """Return `$HPC_DET_ROOT`, or the root that the site sets, or `~/hpc_det`, without checking the folder.

    Raises UsageError if the site's settings are wrong.
    """
    if configured := env.get(VARIABLE):
        return Root(Path(configured).expanduser().absolute(), VARIABLE)
    if setting := site_settings(env).root:
        root = root_for(setting, user_name(env), str(Path.home()), env, remedy=f"set it, or set {VARIABLE}")
        return Root(root, f"{setting.file}: root")
    return Root(Path.home() / FOLDER, "the default")


def danger(root: Path) -> tuple[str, str] | None:
    """Return why other users can change files below `root` that the user's jobs run, and the remedy; None if not."""
    try:
        found = os.stat(root)
    except OSError:  # it does not exist yet, and will be created for this user only
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, who may change what your jobs run", "set it to a folder of yours"
    if not others_may_write(found):
        return None
    # A sticky folder such as /tmp is not safe either: other users can create files in it, such as templates.
    mode, is_sticky = stat.S_IMODE(found.st_mode), bool(found.st_mode & stat.S_ISVTX)
    remedy = "set it to a folder of yours" if is_sticky or found.st_uid != os.geteuid() else f"chmod go-w {root}"
    return f"has mode {mode:04o}, so others may change what your jobs run", remedy


def root_of(owner: str, env: Mapping[str, str]) -> Path:
    """Return the state root of another user, unless they have set HPC_DET_ROOT. `owner`: the name of the user, or the
    path of the state root.

    Raises UsageError if the user does not exist, or if the site's root depends on other variables of that user.
    """
    if "/" in owner:
        return Path(owner).expanduser().absolute()
    try:
        home = pwd.getpwnam(owner).pw_dir
    except KeyError:
        raise UsageError(f"{owner}: unknown user; give the name of a user, or the path of their HPC_DET_ROOT") from None
    setting = site_settings(env).root
    if setting is None:
        return Path(home) / FOLDER
    return root_for(setting, owner, home, {}, remedy=f"in place of {owner}, give the path of their {VARIABLE}")


@dataclass(frozen=True)
class ExperimentStore:
    """All experiments below one state root."""

    root: Path

    @property
    def index(self) -> Path:
        """A cache of facts about inactive experiments, written by listings: see hpc_det.view.experiments."""
        return self.root / ".index.json"

    def folder(self, number: int) -> ExperimentFolder:
        return ExperimentFolder(self.root / "experiments" / str(number))

    def existing(self, number: int) -> ExperimentFolder:
        """Return the experiment `number`. Raises UsageError if it does not exist or is not shared with this user."""
        found = self.folder(number)
        try:
            found.config.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"experiment {number}: not found below {self.root}, {self._newest()}; `hpc-det experiment "
                f"list` shows all"
            ) from None
        except PermissionError:
            raise UsageError(
                f"experiment {number}: below {self.root}, and not shared with you; its owner can share a new "
                f"experiment, for instance with `hpc-det experiment fork {number} --shared=GROUP`"
            ) from None
        return found

    def _newest(self) -> str:
        """Return a clause that names the newest experiment, for a message."""
        try:
            newest = max((found.id for found in self.all()), default=None)
        except (OSError, UsageError):
            return "which you may not read"
        return "which has no experiment" if newest is None else f"where the newest is {newest}"

    def all(self) -> Iterator[ExperimentFolder]:
        """Return all experiments that are created completely and that this user may read, oldest first."""
        return (found for found in self.folders() if is_in_sight(found))

    def folders(self) -> Iterator[ExperimentFolder]:
        """Return the folders of all experiments, also of those that are being created or were never completed."""
        return map(self.folder, self._numbers())

    def next_id(self) -> int:
        """Return the id that `create` would use now."""
        # ids of deleted experiments are not used again
        return max([*self._numbers(), *self._numbers(_DELETED)], default=0) + 1

    def deleted(self, number: int) -> Path:
        """Return the folder of an experiment that is being deleted.

        An empty folder remains if the experiment was the newest, so that its number is not used again.
        """
        return self.root / "experiments" / f"{_DELETED}{number}"

    def all_deleted(self) -> list[Path]:
        """Return the folders of all deleted experiments that still exist, oldest first."""
        return [self.deleted(number) for number in self._numbers(_DELETED)]

    @property
    def cleaned(self) -> Path:
        """A file whose modification time is the last run of `cleanup` over all experiments."""
        return self.root / ".cleaned"

    def create(self, group: Group | None = None) -> ExperimentFolder:
        """Create the folder of a new experiment with the next id. `group`: may read it; None: only its owner may.

        Raises UsageError if the state root is not writable, or is already shared with another group.
        """
        try:
            return self._create(group)
        except OSError as error:
            where = "" if error.filename in (None, str(self.root)) else f"{error.filename}: "
            remedy = remedy_of(error) or f"set {VARIABLE} to a folder of yours that all nodes see"
            raise UsageError(
                f"creating an experiment below {self.root} failed: {where}{error.strerror}; {remedy}"
            ) from None

    def _create(self, group: Group | None) -> ExperimentFolder:
        for parent in (self.root, self.root / "experiments"):
            make_private(parent)
        if group:
            group.let_in(self.root)
        while True:
            folder = self.folder(self.next_id())
            try:
                disk.make_folder(folder.path, PRIVATE_FOLDER)
            except FileExistsError:  # mkdir is atomic on all file systems: another process took this id
                continue
            if group:
                share(folder.path, group.number)
            flush_folder(folder.path.parent)
            return folder

    def _numbers(self, prefix: str = "") -> list[int]:
        try:
            names = [entry.name for entry in (self.root / "experiments").iterdir() if entry.name.startswith(prefix)]
        except FileNotFoundError:
            return []
        except PermissionError as error:
            raise UsageError(f"{error.filename}: permission denied; no experiment there is shared with you") from None
        return sorted(int(rest) for name in names if (rest := name[len(prefix) :]).isdecimal())


def is_in_sight(experiment: ExperimentFolder) -> bool:
    """Return whether the experiment is created completely, so that its jobs may be in the queue."""
    return os.path.exists(experiment.config)  # written after all other files, and deleted first
