"""Commands as other users: in a forked process that has given up the rights of root."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from hpc_det.cli.main import main

SHARED_GROUP = 4242
"""A group id that needs no name on this machine."""


@dataclass(frozen=True)
class User:
    number: int
    groups: tuple[int, ...]


COLLEAGUE = User(4243, (SHARED_GROUP,))
STRANGER = User(4244, ())


def as_user(user: User, act: Callable[[], int]) -> int:
    """Run `act` as the user in a forked process that shares stdout and stderr; return its exit code.

    All modules that it needs must be loaded before, since the interpreter may be readable by root only.
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
