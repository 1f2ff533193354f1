"""Commands as other users run them: in a forked process that has given up all that root may do."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from hpc_det.cli.main import main

SHARED_GROUP = 4242
"""Nobody has to know it by a name."""


@dataclass(frozen=True)
class User:
    number: int
    groups: tuple[int, ...]


COLLEAGUE = User(4243, (SHARED_GROUP,))
STRANGER = User(4244, ())


def as_user(user: User, act: Callable[[], int]) -> int:
    """The exit code of what the user does. What it prints is this process's; what it loads was loaded before, for the
    interpreter may lie where only root may read.
    """
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setgroups(user.groups)
            os.setgid(user.number)
            os.setuid(user.number)
            code = act()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hpc_det_as(user: User, *arguments: object) -> int:
    return as_user(user, lambda: main([str(argument) for argument in arguments]))
