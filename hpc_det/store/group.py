"""A group of users, with whom an experiment is shared, and its way to it.

root               0710   the group goes through, and finds nothing that it cannot name
root/experiments   0750   it sees the numbers of all experiments
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
"""What somebody may do with a folder, in the bits of others; those of the group are three to the left."""


@dataclass(frozen=True)
class Group:
    number: int

    @classmethod
    def of(cls, name: str | None) -> Group:
        """The group `name` or, without one, the user's primary group. Raises UsageError where it is not to be had."""
        primary, *others = (cls(number) for number in dict.fromkeys([os.getegid(), *os.getgroups()]))
        if name is None:
            if primary.name == pwd.getpwuid(os.geteuid()).pw_name:
                raise UsageError(f"--shared: your primary group {primary.name!r} is yours alone; {_choice(others)}")
            return primary
        found = next((group for group in (primary, *others) if name in (group.name, str(group.number))), None)
        if found is None:
            raise UsageError(f"--shared={name}: you are in no such group; {_choice([primary, *others])}")
        return found

    @property
    def name(self) -> str:
        """Or its number, where it has none."""
        try:
            return grp.getgrgid(self.number).gr_name
        except KeyError:
            return str(self.number)

    def let_in(self, root: Path) -> None:
        """Let its members see which experiments there are below `root`, and nothing else of it.

        Raises UsageError where another group comes in already.
        """
        needed = {root: GO_THROUGH, root / "experiments": LOOK_IN}
        closed = [folder for folder, what in needed.items() if not self._may(folder, what)]
        for folder in closed:
            self._insist_on_no_other(folder)
        if root in closed:
            _close_all_in(root)
        for folder in closed:
            os.chown(folder, -1, self.number)
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | needed[folder] << 3)

    def obstacles(self, folder: Path) -> Iterator[str]:
        """What keeps its members from going to `folder`, a sentence each: folders that are no matter of ours."""
        for above in reversed(folder.resolve().parents):
            if not self._may(above, GO_THROUGH):
                mode = stat.S_IMODE(above.stat().st_mode)
                yield (
                    f"group {self.name!r} cannot come to {folder}: {above} has mode {mode:04o}; `chmod o+x {above}` "
                    f"lets it through, and nobody look in"
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


def _close_all_in(root: Path) -> None:
    """What lies in the root beside experiments, a careless umask may have left open behind the root's closed door."""
    for entry in root.iterdir():
        if entry.name != "experiments" and not entry.is_symlink():
            entry.chmod(stat.S_IMODE(entry.stat().st_mode) & (stat.S_ISGID | PRIVATE_FOLDER))


def _choice(groups: Sequence[Group]) -> str:
    if not groups:
        return "and you are in no other"
    return f"give one of yours with --shared=GROUP: {', '.join(group.name for group in groups)}"
