"""The state root of a user, and all experiments below it: which there are, and the number of the next one."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node import disk
from hpc_det.node.files import PRIVATE_FOLDER, flush_folder, make_private, others_may_write, share
from hpc_det.store.folders import ExperimentFolder
from hpc_det.store.group import Group

_DELETED = ".deleted-"
FOLDER = "hpc_det"
"""The state root in a user's home, where HPC_DET_ROOT names no other."""


def state_root(env: Mapping[str, str]) -> Path:
    """`$HPC_DET_ROOT`, or `~/hpc_det`. Raises UsageError where others may change what is in it: jobs run that."""
    root = configured_root(env)
    if problem := danger(root):
        raise UsageError(f"HPC_DET_ROOT: {root} {': '.join(problem)}")
    return root


def configured_root(env: Mapping[str, str]) -> Path:
    """The same without a look at it."""
    configured = env.get("HPC_DET_ROOT")
    return Path(configured).expanduser().absolute() if configured else Path.home() / FOLDER


def danger(root: Path) -> tuple[str, str] | None:
    """Why others may change what the user's jobs run from `root`, and the remedy; None where they may not.

    A sticky folder such as /tmp is no better: others may make files in it, such as templates.
    """
    try:
        found = os.stat(root)
    except OSError:
        return None
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, who may change what your jobs run", "set it to a folder of yours"
    if not others_may_write(found):
        return None
    mode, is_sticky = stat.S_IMODE(found.st_mode), bool(found.st_mode & stat.S_ISVTX)
    remedy = "set it to a folder of yours" if is_sticky or found.st_uid != os.geteuid() else f"chmod go-w {root}"
    return f"has mode {mode:04o}, so others may change what your jobs run", remedy


def root_of(owner: str) -> Path:
    """Where the state of somebody else lives: a user's name, or the folder itself where it is not in their home.

    Raises UsageError for no such user.
    """
    if "/" in owner:
        return Path(owner).expanduser().absolute()
    try:
        return Path(pwd.getpwnam(owner).pw_dir) / FOLDER
    except KeyError:
        raise UsageError(
            f"{owner}: no user is called so; give a user's name, or the folder that is their HPC_DET_ROOT"
        ) from None


@dataclass(frozen=True)
class ExperimentStore:
    """All experiments below one state root."""

    root: Path

    @property
    def index(self) -> Path:
        """What is known of experiments that rest: see hpc_det.view.experiments. Written by whoever lists all."""
        return self.root / ".index.json"

    def folder(self, number: int) -> ExperimentFolder:
        return ExperimentFolder(self.root / "experiments" / str(number))

    def existing(self, number: int) -> ExperimentFolder:
        """The experiment `number`; UsageError where there is none."""
        found = self.folder(number)
        try:
            found.config.stat()
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"experiment {number}: not found below {self.root}; `hpc-det experiment list` shows all"
            ) from None
        except PermissionError:
            raise UsageError(
                f"experiment {number}: below {self.root}, and not shared with you; its owner can share what is begun "
                f"anew, as with `hpc-det experiment fork {number} --shared=GROUP`"
            ) from None
        return found

    def all(self) -> Iterator[ExperimentFolder]:
        """Every experiment that is in sight and that this user may read, oldest first."""
        return (found for found in self.folders() if is_in_sight(found))

    def folders(self) -> Iterator[ExperimentFolder]:
        """Also those that are being created, and what is left of those that never were."""
        return map(self.folder, self._numbers())

    def next_id(self) -> int:
        """The id that `create` would take now."""
        return max([*self._numbers(), *self._numbers(_DELETED)], default=0) + 1

    def deleted(self, number: int) -> Path:
        """The folder of an experiment that is being deleted. An empty one stays, so that its number never comes again
        where it was the newest.
        """
        return self.root / "experiments" / f"{_DELETED}{number}"

    def all_deleted(self) -> list[Path]:
        """Oldest first."""
        return [self.deleted(number) for number in self._numbers(_DELETED)]

    @property
    def cleaned(self) -> Path:
        """Its time is when `cleanup` looked at all experiments last."""
        return self.root / ".cleaned"

    def create(self, group: Group | None = None) -> ExperimentFolder:
        """Take the next id. `mkdir` is atomic on every file system, so two at once get two ids.

        `group` may read it. Raises UsageError where the state root takes no folder, or is another group's.
        """
        try:
            return self._create(group)
        except OSError as error:
            raise UsageError(
                f"HPC_DET_ROOT: {self.root} takes no experiment: {error.strerror}; set it to a folder of yours that "
                f"all nodes see"
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
            except FileExistsError:
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
            raise UsageError(f"{error.filename}: may not be read; nothing there is shared with you") from None
        return sorted(int(rest) for name in names if (rest := name[len(prefix) :]).isdecimal())


def is_in_sight(experiment: ExperimentFolder) -> bool:
    """Whether all its files are there, and its jobs may be in the queue."""
    return os.path.exists(experiment.config)
