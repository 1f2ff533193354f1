"""A group of users with which experiments are shared, and its permissions above them.

root               0710   the group can pass through, but not list the content
root/experiments   0750   the group can list the numbers of all experiments
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_det.errors import UsageError
from hpc_det.node.files import PRIVATE_FOLDER

GO_THROUGH, LOOK_IN = 0o1, 0o5
"""Permission bits for a folder, as for "others"; those of the group are shifted left by three."""


@dataclass(frozen=True)
class Group:
    """A group of users."""

    number: int

    @classmethod
    def of(cls, name: str | None) -> Group:
        """Return the group with this name or number; None: the user's primary group.

        Raises UsageError if the user is not a member, and if the primary group has no other members.
        """
        primary, *others = (cls(number) for number in dict.fromkeys([os.getegid(), *os.getgroups()]))
        if name is None:
            # Many systems give each user a private group with the user's name
            if primary.name == pwd.getpwuid(os.geteuid()).pw_name:
                raise UsageError(f"--shared: your primary group {primary.name!r} has only you; {_choice(others)}")
            return primary
        found = next((group for group in (primary, *others) if name in (group.name, str(group.number))), None)
        if found is None:
            raise UsageError(f"--shared={name}: you are not in this group; {_choice([primary, *others])}")
        return found

    @property
    def name(self) -> str:
        """The name of the group, or its number if it has no name."""
        try:
            return grp.getgrgid(self.number).gr_name
        except KeyError:
            return str(self.number)

    def let_in(self, root: Path) -> None:
        """Let the members list the experiments below `root`, and nothing else below it.

        Raises UsageError if `root` is already shared with another group.
        """
        needed = {root: GO_THROUGH, root / "experiments": LOOK_IN}
        closed = [folder for folder, what in needed.items() if not self._may(folder, what)]
        for folder in closed:
            self._insist_on_no_other(folder)
        if root in closed:  # before it is opened: until now its own mode protected its content
            _close_all_in(root)
        for folder in closed:
            os.chown(folder, -1, self.number)  # -1: the owner stays the same
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | needed[folder] << 3)

    def obstacles(self, folder: Path) -> Iterator[str]:
        """Yield a sentence for each folder above `folder` that the members cannot pass through."""
        for above in reversed(folder.resolve().parents):
            if not self._may(above, GO_THROUGH):
                mode = stat.S_IMODE(above.stat().st_mode)
                yield (
                    f"group {self.name!r} cannot reach {folder}: {above} has mode {mode:04o}; `chmod o+x {above}` "
                    f"lets users pass through it, but not list it"
                )

    def _may(self, folder: Path, what: int) -> bool:
        found = folder.stat()
        granted = found.st_mode >> 3 if found.st_gid == self.number else found.st_mode
        return granted & what == what

    def _insist_on_no_other(self, folder: Path) -> None:
        found = folder.stat()
        if found.st_gid != self.number and found.st_mode & stat.S_IRWXG:
            raise UsageError(
                f"--shared: {folder} is open to group {Group(found.st_gid).name!r}, and a folder has one group; share "
                f"with that one, or set HPC_DET_ROOT to another folder to share with {self.name!r}"
            )


def name_of_user(number: int) -> str:
    """Return the name of a user, or the number of a user without a name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _close_all_in(root: Path) -> None:
    """Take all permissions of group and others from everything in `root` but the experiments."""
    # Files in a closed folder may be open by a careless umask
    for entry in root.iterdir():
        if entry.name != "experiments" and not entry.is_symlink():
            entry.chmod(stat.S_IMODE(entry.stat().st_mode) & (stat.S_ISGID | PRIVATE_FOLDER))


def _choice(groups: Sequence[Group]) -> str:
    if not groups:
        return "and you are not in any other group"
    return f"give one of your groups with --shared=GROUP: {', '.join(group.name for group in groups)}"
